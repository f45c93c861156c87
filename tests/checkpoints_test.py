# SPDX-License-Identifier: Apache-2.0
"""Layouts read and written without T5X or torch, and every refusal."""

import json
import os
import shutil

from flax import serialization
from flax import traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from spec_decode.models import checkpoints
from spec_decode.models import files
from spec_decode.models import hugging_face
from spec_decode.models import transformer

# No two sizes are equal, so that a transposed array cannot pass.
CONFIG = transformer.T5Config(
  vocab_size=50,
  emb_dim=16,
  num_heads=3,
  num_encoder_layers=2,
  num_decoder_layers=3,
  head_dim=4,
  mlp_dim=24,
  mlp_activations=('gelu', 'linear'),
)
TIED = CONFIG.replace(mlp_activations=('relu',), logits_via_embedding=True)
SAVERS = [checkpoints.save_t5x_legacy, checkpoints.save_t5x_orbax]


def random_arrays(config, seed=0):
  rng = np.random.default_rng(seed)
  shapes = checkpoints.expected_shapes(config)
  return {
    name: rng.standard_normal(shape, np.float32)
    for name, shape in shapes.items()
  }


def nest(arrays):
  return traverse_util.unflatten_dict(arrays, sep='/')


def assert_holds(params, arrays):
  flat = traverse_util.flatten_dict(params, sep='/')
  assert flat.keys() == arrays.keys()
  for name, x in arrays.items():
    assert flat[name].dtype == jnp.float32, name
    np.testing.assert_array_equal(flat[name], x, err_msg=name)


def write(path, arrays, metadata=None):
  arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
  path.write_bytes(safetensors.numpy.save(arrays, metadata))


@pytest.fixture
def arrays():
  return random_arrays(CONFIG)


def bfloat16(arrays):
  return {
    name: x.astype(ml_dtypes.bfloat16).astype(np.float32)
    for name, x in arrays.items()
  }


# What the config implies.


def test_expected_shapes_of_each_version():
  shapes = checkpoints.expected_shapes(CONFIG)
  assert len(shapes) == 6 + 2 * 9 + 3 * 14
  assert shapes['token_embedder/embedding'] == (50, 16)
  assert shapes['decoder/logits_dense/kernel'] == (16, 50)
  assert shapes['encoder/relpos_bias/rel_embedding'] == (3, 32)
  assert shapes['encoder/layers_1/attention/query/kernel'] == (16, 12)
  assert shapes['decoder/layers_2/mlp/wi_1/kernel'] == (16, 24)
  shapes = checkpoints.expected_shapes(TIED)
  assert 'decoder/logits_dense/kernel' not in shapes
  assert shapes['decoder/layers_2/mlp/wi/kernel'] == (16, 24)


def test_expected_shapes_of_eleven_billion_cost_nothing():
  xxl = transformer.T5Config(
    vocab_size=32128,
    emb_dim=4096,
    num_heads=64,
    num_encoder_layers=24,
    num_decoder_layers=24,
    head_dim=64,
    mlp_dim=10240,
    mlp_activations=('gelu', 'linear'),
  )
  shapes = checkpoints.expected_shapes(xxl)
  assert sum(np.prod(shape, dtype=np.int64) for shape in shapes.values()) == (
    11_135_332_352
  )


# T5X's layouts, compared without reading.


@pytest.mark.parametrize('save', SAVERS)
def test_names_and_shapes_of_t5x_layouts_are_compared(tmp_path, arrays, save):
  save(tmp_path, nest(arrays), 5)
  path, expected = (
    tmp_path / 'checkpoint_5',
    dict(checkpoints.expected_shapes(CONFIG)),
  )
  checkpoints.check_t5x(path, expected)
  del expected['decoder/decoder_norm/scale']
  expected |= {'token_embedder/embedding': (50, 17), 'more/kernel': (2,)}
  with pytest.raises(ValueError) as error:
    checkpoints.check_t5x(path, expected)
  for line in (
    'missing: more/kernel, expected (2,)',
    'unexpected: decoder/decoder_norm/scale, got (16,)',
    'wrong: token_embedder/embedding, expected (50, 17), got (50, 16)',
  ):
    assert line in str(error.value)


def test_comparing_reads_no_array_and_only_layouts_of_t5x(tmp_path, arrays):
  checkpoints.save_t5x_legacy(tmp_path, nest(arrays), 5)
  for folder in (tmp_path / 'checkpoint_5').glob('target.*'):
    shutil.rmtree(folder)
  expected = checkpoints.expected_shapes(CONFIG)
  checkpoints.check_t5x(tmp_path / 'checkpoint_5', expected)
  ours = tmp_path / 'net.safetensors'
  checkpoints.save(ours, nest(arrays))
  bare = tmp_path / 'checkpoint_6'  # parameters alone
  orbax_save(bare, nest(arrays))
  checkpoints.save_t5x_orbax(tmp_path, nest(arrays), 7)
  renamed = (tmp_path / 'checkpoint_7').rename(tmp_path / 'best')
  for path in (ours, bare, renamed):
    assert_holds(checkpoints.load(path, CONFIG), arrays)
    with pytest.raises(ValueError, match=f'got {path}.*convert_to_t5x.gin'):
      checkpoints.check_t5x(path, expected)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_names_shapes_and_types_of_our_file_are_compared(
  tmp_path, arrays, dtype
):
  path, expected = (
    tmp_path / 'a.safetensors',
    checkpoints.expected_shapes(CONFIG),
  )
  checkpoints.save(path, nest(arrays), dtype=dtype)
  checkpoints.check(path, expected)
  with pytest.raises(ValueError, match='missing: more, expected .2,.'):
    checkpoints.check(path, expected | {'more': (2,)})
  write(path, arrays | {'decoder/decoder_norm/scale': np.ones(16, np.int32)})
  with pytest.raises(ValueError, match='expected .16,., got int32'):
    checkpoints.check(path, expected)


# Our own file.


def test_ours_roundtrip(tmp_path, arrays):
  path = tmp_path / 'net.safetensors'
  metadata = {'config': {'emb_dim': 16}, 'step': 3, 'name': 'é'}
  checkpoints.save(path, nest(arrays), metadata)
  assert_holds(checkpoints.load(path, CONFIG), arrays)
  assert checkpoints.load_metadata(path) == metadata
  assert os.listdir(tmp_path) == ['net.safetensors']
  assert 'decoder/layers_0/mlp/wi_0/kernel' in safetensors.numpy.load_file(path)


def test_ours_roundtrip_in_bfloat16(tmp_path, arrays):
  path = tmp_path / 'net.safetensors'
  checkpoints.save(path, nest(arrays), dtype='bfloat16')
  assert path.stat().st_size < 1.5 * 2 * sum(x.size for x in arrays.values())
  assert_holds(checkpoints.load(path, CONFIG), bfloat16(arrays))
  params = checkpoints.load(path, CONFIG, dtype=jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}
  # Saved again from bfloat16 arrays, in either type.
  for dtype in (jnp.bfloat16, 'float32'):
    checkpoints.save(path, params, dtype=dtype, overwrite=True)
    assert_holds(checkpoints.load(path, CONFIG), bfloat16(arrays))


def test_ours_keeps_transposed_views(tmp_path, arrays):
  path = tmp_path / 'net.safetensors'
  strided = {name: np.asfortranarray(x) for name, x in arrays.items()}
  checkpoints.save(path, nest(strided))
  assert_holds(checkpoints.load(path, CONFIG), arrays)


def test_overwriting_is_asked_for(tmp_path, arrays):
  path = tmp_path / 'net.safetensors'
  checkpoints.save(path, nest(arrays))
  other = random_arrays(CONFIG, seed=1)
  with pytest.raises(FileExistsError, match='overwrite=True'):
    checkpoints.save(path, nest(other))
  assert_holds(checkpoints.load(path, CONFIG), arrays)
  checkpoints.save(path, nest(other), overwrite=True)
  assert_holds(checkpoints.load(path, CONFIG), other)


def test_failed_save_leaves_the_old_file(tmp_path, arrays, monkeypatch):
  path = tmp_path / 'net.safetensors'
  checkpoints.save(path, nest(arrays))

  def fail(*_):
    raise OSError('disk full')

  monkeypatch.setattr(os, 'replace', fail)
  with pytest.raises(OSError, match='disk full'):
    checkpoints.save(path, nest(random_arrays(CONFIG, 1)), overwrite=True)
  assert os.listdir(tmp_path) == ['net.safetensors']
  assert_holds(checkpoints.load(path, CONFIG), arrays)


@pytest.mark.parametrize('dtype', ['float16', 'int8'])
def test_other_types_are_refused(tmp_path, arrays, dtype):
  path = tmp_path / 'net.safetensors'
  with pytest.raises(ValueError, match='expected float32 or bfloat16'):
    checkpoints.save(path, nest(arrays), dtype=dtype)
  with pytest.raises(ValueError, match='ends in .safetensors'):
    checkpoints.save(tmp_path / 'net.npz', nest(arrays))
  assert not os.listdir(tmp_path)


def test_metadata_of_a_foreign_file_is_empty(tmp_path, arrays):
  write(tmp_path / 'a.safetensors', arrays, {'format': 'pt'})
  assert checkpoints.load_metadata(tmp_path / 'a.safetensors') == {}


# T5X's layouts.


@pytest.mark.parametrize('saver', SAVERS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_t5x_roundtrip(tmp_path, arrays, saver, dtype):
  # TensorStore leaves out chunks equal to its fill value unless told not to.
  arrays['decoder/decoder_norm/scale'][:] = 0
  saver(tmp_path, nest(arrays), 1000, dtype=dtype)
  assert os.listdir(tmp_path) == ['checkpoint_1000']
  want = arrays if dtype == 'float32' else bfloat16(arrays)
  assert_holds(checkpoints.load(tmp_path / 'checkpoint_1000', CONFIG), want)
  with pytest.raises(FileExistsError, match='another step'):
    saver(tmp_path, nest(arrays), 1000)


def rewrite_legacy(path, change):
  """Applies `change` to each array or spec in a legacy msgpack file."""
  file = path / 'checkpoint'
  tree = serialization.msgpack_restore(file.read_bytes())
  target = traverse_util.flatten_dict(
    tree['optimizer']['target'], is_leaf=lambda _, x: 'driver' in x, sep='/'
  )
  target = {name: change(name, leaf) for name, leaf in target.items()}
  tree['optimizer']['target'] = nest(target)
  file.write_bytes(serialization.msgpack_serialize(tree))


def test_legacy_with_paths_beside_a_gcs_kvstore(tmp_path, arrays):
  checkpoints.save_t5x_legacy(tmp_path, nest(arrays), 1)

  def old_gcs(_, spec):
    path = spec['kvstore']['path']
    kvstore = {'driver': 'gcs', 'bucket': 't5x-dummy-bucket'}
    return {**spec, 'kvstore': kvstore, 'path': path}

  rewrite_legacy(tmp_path / 'checkpoint_1', old_gcs)
  assert_holds(checkpoints.load(tmp_path / 'checkpoint_1', CONFIG), arrays)


def test_legacy_with_arrays_inside_the_msgpack_file(tmp_path, arrays):
  checkpoints.save_t5x_legacy(tmp_path, nest(arrays), 1)
  path = tmp_path / 'checkpoint_1'
  inside = lambda k, spec: arrays[k] if k.endswith('scale') else spec
  rewrite_legacy(path, inside)
  for folder in path.glob('*.scale'):
    shutil.rmtree(folder)
  assert_holds(checkpoints.load(path, CONFIG), arrays)


def test_legacy_bits_of_bfloat16_are_refused(tmp_path, arrays):
  checkpoints.save_t5x_legacy(tmp_path, nest(arrays), 1)
  rewrite_legacy(
    tmp_path / 'checkpoint_1',
    lambda k, _: arrays[k].astype(ml_dtypes.bfloat16).view(np.uint16),
  )
  with pytest.raises(ValueError, match=r'expected \(16, 24\), got uint16'):
    checkpoints.load(tmp_path / 'checkpoint_1', CONFIG)


@pytest.mark.parametrize('lost', ['0.0', '.zarray'])
def test_legacy_with_a_lost_file_is_refused(tmp_path, arrays, lost):
  checkpoints.save_t5x_legacy(tmp_path, nest(arrays), 1)
  path = tmp_path / 'checkpoint_1'
  (path / 'target.decoder.layers_0.mlp.wi_0.kernel' / lost).unlink()
  with pytest.raises(ValueError, match=r'layers_0\.mlp\.wi_0\.kernel'):
    checkpoints.load(path, CONFIG)


def orbax_save(path, tree, use_ocdbt=True):
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


@pytest.mark.parametrize('use_ocdbt', [True, False])
@pytest.mark.parametrize('wrapped', [True, False])
def test_orbax_parameters_alone(tmp_path, arrays, use_ocdbt, wrapped):
  tree = nest(arrays)
  if wrapped:
    tree = {'params': tree, 'opt_state': [np.ones(3), {}], 'step': 7}
  orbax_save(tmp_path / 'net', tree, use_ocdbt)
  assert_holds(checkpoints.load(tmp_path / 'net', CONFIG), arrays)


def test_orbax_manager_step(tmp_path, arrays):
  with ocp.CheckpointManager(tmp_path / 'run') as manager:
    manager.save(5, args=ocp.args.StandardSave(nest(arrays)))
  assert_holds(checkpoints.load(tmp_path / 'run' / '5', CONFIG), arrays)


# Hugging Face's names.


def hf_file(arrays):
  """The same arrays as Hugging Face stores a T5 of these sizes."""
  out = {'shared.weight': arrays['token_embedder/embedding']}
  if 'decoder/logits_dense/kernel' in arrays:
    out['lm_head.weight'] = arrays['decoder/logits_dense/kernel'].T

  def attention(there, here):
    for t, h in zip('qkvo', ('query', 'key', 'value', 'out'), strict=True):
      out[f'{there}.{t}.weight'] = arrays[f'{here}/{h}/kernel'].T

  for side, blocks in (('encoder', 2), ('decoder', 3)):
    norm = arrays[f'{side}/{side}_norm/scale']
    out[f'{side}.final_layer_norm.weight'] = norm
    bias = arrays[f'{side}/relpos_bias/rel_embedding'].T
    first = f'{side}.block.0.layer.0.SelfAttention'
    out[f'{first}.relative_attention_bias.weight'] = bias
    own = 'attention' if side == 'encoder' else 'self_attention'
    for i in range(blocks):
      there, here = f'{side}.block.{i}.layer', f'{side}/layers_{i}'
      attention(f'{there}.0.SelfAttention', f'{here}/{own}')
      norms = [f'pre_{own}_layer_norm', 'pre_mlp_layer_norm']
      if side == 'decoder':
        cross = 'encoder_decoder_attention'
        attention(f'{there}.1.EncDecAttention', f'{here}/{cross}')
        norms.insert(1, 'pre_cross_attention_layer_norm')
      for j, name in enumerate(norms):
        out[f'{there}.{j}.layer_norm.weight'] = arrays[f'{here}/{name}/scale']
      for name in ('wi', 'wi_0', 'wi_1', 'wo'):
        if f'{here}/mlp/{name}/kernel' in arrays:
          dense = f'{there}.{len(norms) - 1}.DenseReluDense.{name}.weight'
          out[dense] = arrays[f'{here}/mlp/{name}/kernel'].T
  return out


@pytest.mark.parametrize('config', [CONFIG, TIED], ids=['1.1', '1.0'])
def test_hf_names(tmp_path, config):
  arrays = random_arrays(config)
  stored = hf_file(arrays)
  assert len(stored) == len(arrays)
  write(tmp_path / 'model.safetensors', stored)
  assert_holds(checkpoints.load(tmp_path, config), arrays)
  file = tmp_path / 'model.safetensors'
  assert_holds(checkpoints.load(file, config), arrays)


def test_hf_shards(tmp_path, arrays):
  stored = hf_file(arrays)
  expected = checkpoints.expected_shapes(CONFIG)
  names = [f'model-0000{i}-of-00003.safetensors' for i in (1, 2, 3)]
  where = {key: names[i % 3] for i, key in enumerate(stored)}
  for name in names:
    shard = {k: x for k, x in stored.items() if where[k] == name}
    write(tmp_path / name, shard)
  index = json.dumps({'metadata': {}, 'weight_map': where})
  (tmp_path / 'model.safetensors.index.json').write_text(index)
  assert_holds(checkpoints.load(tmp_path, CONFIG), arrays)
  checkpoints.check(tmp_path, expected)
  name = 'decoder/layers_0/mlp/wo/kernel'
  with pytest.raises(ValueError, match=f'wrong: {name}, expected .3, 2.,'):
    checkpoints.check(tmp_path, expected | {name: (3, 2)})
  (tmp_path / names[1]).unlink()
  with pytest.raises(FileNotFoundError, match='00002-of-00003'):
    checkpoints.check(tmp_path, expected)
  with pytest.raises(FileNotFoundError, match='00002-of-00003'):
    checkpoints.load(tmp_path, CONFIG)


def test_hf_surplus_of_old_files_is_dropped(tmp_path):
  arrays = random_arrays(TIED)
  stored = hf_file(arrays)
  for name in ('lm_head', 'encoder.embed_tokens', 'decoder.embed_tokens'):
    stored[f'{name}.weight'] = stored['shared.weight']
  cross = 'decoder.block.0.layer.1.EncDecAttention'
  bias = np.ones((32, 3), np.float32)
  stored[f'{cross}.relative_attention_bias.weight'] = bias
  write(tmp_path / 'model.safetensors', stored)
  assert_holds(checkpoints.load(tmp_path, TIED), arrays)


def test_hf_output_matrix_of_its_own_is_not_dropped(tmp_path):
  stored = hf_file(random_arrays(TIED))
  stored['lm_head.weight'] = stored['shared.weight'] + 1
  write(tmp_path / 'model.safetensors', stored)
  with pytest.raises(ValueError, match='unexpected: lm_head.weight'):
    checkpoints.load(tmp_path, TIED)


HF_SIZES = {
  'vocab_size': 50,
  'd_model': 16,
  'num_heads': 3,
  'num_layers': 2,
  'num_decoder_layers': 3,
  'd_kv': 4,
  'd_ff': 24,
}


@pytest.mark.parametrize(
  'fields, config',
  [
    ({'model_type': 't5'}, TIED),
    ({'model_type': 't5', 'feed_forward_proj': 'relu'}, TIED),
    # As T5 1.1 was published, and as it is written today.
    (
      {
        'model_type': 't5',
        'feed_forward_proj': 'gated-gelu',
        'tie_word_embeddings': False,
      },
      CONFIG,
    ),
    (
      {
        'model_type': 't5',
        'feed_forward_proj': 'gated-gelu',
        'tie_word_embeddings': True,
        'scale_decoder_outputs': False,
      },
      CONFIG,
    ),
    ({'model_type': 'mt5', 'feed_forward_proj': 'gated-gelu'}, CONFIG),
  ],
)
def test_hf_config(tmp_path, fields, config):
  (tmp_path / 'config.json').write_text(json.dumps({**HF_SIZES, **fields}))
  assert hugging_face.config(tmp_path) == config


def test_hf_config_without_decoder_layers(tmp_path):
  raw = {**HF_SIZES, 'model_type': 't5', 'num_decoder_layers': None}
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  assert hugging_face.config(tmp_path).num_decoder_layers == 2


def test_hf_config_refusals_come_together(tmp_path):
  raw = {
    **HF_SIZES,
    'model_type': 'umt5',
    'feed_forward_proj': 'gelu',
    'relative_attention_num_buckets': 64,
  }
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(ValueError, match='Use a T5 1.0 or 1.1') as info:
    hugging_face.config(tmp_path)
  assert 'model_type is umt5, expected t5 or mt5' in str(info.value)
  assert 'feed_forward_proj is gelu, expected relu' in str(info.value)
  assert 'num_buckets is 64, expected 32' in str(info.value)


# Refusals of `load`.


def test_every_difference_is_named_at_once(tmp_path, arrays):
  del arrays['decoder/layers_2/mlp/wo/kernel']
  del arrays['encoder/encoder_norm/scale']
  arrays['encoder/layers_2/mlp/wo/kernel'] = np.zeros((24, 16), np.float32)
  arrays['decoder/surprise'] = np.zeros(5, np.float32)
  shape = (24, 15)
  arrays['encoder/layers_0/mlp/wo/kernel'] = np.zeros(shape, np.float32)
  wi_0 = 'decoder/layers_0/mlp/wi_0/kernel'
  arrays[wi_0] = arrays[wi_0].T
  write(tmp_path / 'a.safetensors', arrays)
  with pytest.raises(ValueError, match='does not hold') as info:
    checkpoints.load(tmp_path / 'a.safetensors', CONFIG)
  assert str(info.value).split('\n')[1:] == [
    '  missing: decoder/layers_2/mlp/wo/kernel, expected (24, 16)',
    '  missing: encoder/encoder_norm/scale, expected (16,)',
    '  unexpected: decoder/surprise, got (5,)',
    '  unexpected: encoder/layers_2/mlp/wo/kernel, got (24, 16)',
    f'  wrong: {wi_0}, expected (16, 24), got (24, 16)',
    '  wrong: encoder/layers_0/mlp/wo/kernel, expected (24, 16), got (24, 15)',
    'Give the config the sizes of this checkpoint, or another path.',
  ]


@pytest.mark.parametrize('saver', SAVERS)
@pytest.mark.parametrize('rows', [48, 64])
def test_another_padding_of_the_vocabulary(tmp_path, arrays, saver, rows):
  saver(tmp_path, nest(arrays), 1)
  config = CONFIG.replace(vocab_size=rows)
  with pytest.raises(ValueError, match=f'vocab_size={rows}.* 50 rows') as info:
    checkpoints.load(tmp_path / 'checkpoint_1', config)
  assert f'expected ({rows}, 16), got (50, 16)' in str(info.value)
  assert f'expected (16, {rows}), got (16, 50)' in str(info.value)


def test_tied_and_untied_are_told_apart(tmp_path):
  untied = TIED.replace(logits_via_embedding=False)
  checkpoints.save(tmp_path / 'a.safetensors', nest(random_arrays(TIED)))
  with pytest.raises(ValueError, match='logits_via_embedding=True'):
    checkpoints.load(tmp_path / 'a.safetensors', untied)
  checkpoints.save(tmp_path / 'b.safetensors', nest(random_arrays(untied)))
  with pytest.raises(ValueError, match='unexpected: decoder/logits_dense'):
    checkpoints.load(tmp_path / 'b.safetensors', TIED)


@pytest.mark.parametrize(
  'name', ['decoder/decoder/mlp/wi_0/kernel', 'encoder/layers/mlp/wo/kernel']
)
def test_scanned_layers_are_refused(tmp_path, arrays, name):
  arrays = {k: x for k, x in arrays.items() if 'layers_' not in k}
  arrays[name] = np.zeros((16, 3, 24), np.float32)
  orbax_save(tmp_path / 'net', {'target': nest(arrays)})
  with pytest.raises(ValueError, match='scanned layers') as info:
    checkpoints.load(tmp_path / 'net', CONFIG)
  assert f'{name}, (16, 3, 24)' in str(info.value)
  assert 'unscanned t5x/examples/t5' in str(info.value)


def test_missing_path(tmp_path):
  with pytest.raises(FileNotFoundError, match='nowhere: no such'):
    checkpoints.load(tmp_path / 'nowhere', CONFIG)
  with pytest.raises(FileNotFoundError, match='no such'):
    checkpoints.load(tmp_path / 'nowhere.safetensors', CONFIG)


def test_unknown_layouts(tmp_path, arrays):
  known = 'safetensors(.|\n)*Hugging Face(.|\n)*legacy(.|\n)*Orbax'
  with pytest.raises(ValueError, match=f'is no checkpoint(.|\n)*{known}'):
    checkpoints.load(tmp_path, CONFIG)
  (tmp_path / 'pytorch_model.bin').write_bytes(b'x')
  with pytest.raises(ValueError, match='Pickles are not read'):
    checkpoints.load(tmp_path, CONFIG)
  with pytest.raises(ValueError, match='is no checkpoint'):
    checkpoints.load(tmp_path / 'pytorch_model.bin', CONFIG)
  checkpoints.save_t5x_legacy(tmp_path, nest(arrays), 7)
  with pytest.raises(ValueError, match='Name one of its checkpoint_N'):
    checkpoints.load(tmp_path, CONFIG)


def test_damaged_files(tmp_path, arrays):
  path = tmp_path / 'a.safetensors'
  checkpoints.save(path, nest(arrays))
  path.write_bytes(path.read_bytes()[:-4])
  with pytest.raises(ValueError, match=r'a\.safetensors is cut short'):
    checkpoints.load(path, CONFIG)
  (tmp_path / 'checkpoint').write_text('model_checkpoint_path: "model.ckpt-1"')
  with pytest.raises(ValueError, match='is no T5X checkpoint'):
    checkpoints.load(tmp_path, CONFIG)


def test_paths_may_be_strings_and_relative(tmp_path, arrays, monkeypatch):
  monkeypatch.chdir(tmp_path)
  checkpoints.save('a.safetensors', nest(arrays))
  assert_holds(checkpoints.load('a.safetensors', CONFIG), arrays)
  for i, saver in enumerate(SAVERS):
    saver('run', nest(arrays), i)
    assert_holds(checkpoints.load(f'run/checkpoint_{i}', CONFIG), arrays)


def test_bucket_paths_reach_tensorstore(monkeypatch):
  """What is asked of TensorStore; a bucket itself would need a network."""
  asked = []

  def fake_open(spec, **_):
    asked.append(spec)
    raise ConnectionError

  monkeypatch.setattr(checkpoints.ts, 'open', fake_open)
  path = files.absolute('gs://bucket/run/checkpoint_1')
  with pytest.raises(ConnectionError):
    checkpoints._zarr(path / 'target.decoder.decoder_norm.scale', open=True)
  assert asked[0]['kvstore'] == {
    'driver': 'gcs',
    'bucket': 'bucket',
    'path': 'run/checkpoint_1/target.decoder.decoder_norm.scale',
  }
