# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that T5X wrote, read here; those written here, read by T5X.

Needs t5x, which is not on PyPI, on the Python path.
"""

import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
from t5x import adafactor
from t5x import checkpoints as t5x_checkpoints
from t5x import models
from t5x import partitioning
from t5x import utils
from t5x.examples.scalable_t5 import network as scalable_network
from t5x.examples.t5 import network

from spec_decode.models import checkpoints
from spec_decode.models import transformer

# No two sizes are equal, so that a transposed array cannot pass.
SIZES = {
  'vocab_size': 50,
  'emb_dim': 16,
  'num_heads': 3,
  'num_encoder_layers': 2,
  'num_decoder_layers': 4,
  'head_dim': 5,
  'mlp_dim': 24,
  'mlp_activations': ('gelu', 'linear'),
}
CONFIG = transformer.T5Config(**SIZES)
STEP = 1000
DTYPES = ['float32', 'bfloat16']
MODULE = network.Transformer(network.T5Config(**SIZES, dropout_rate=0.0))


@pytest.fixture(scope='module')
def partitioner():
  return partitioning.PjitPartitioner(num_partitions=1)


@functools.cache
def fresh(partitioner, module=MODULE, train=False):
  """(shapes, state) of a stock model, with an optimizer's state or without."""
  vocabulary = seqio.PassThroughVocabulary(SIZES['vocab_size'])
  optimizer = adafactor.Adafactor(
    decay_rate=0.8,
    logical_factor_rules=adafactor.standard_logical_factor_rules(),
  )
  model = models.EncoderDecoderModel(module, vocabulary, vocabulary, optimizer)
  shapes = {'encoder_input_tokens': (1, 4), 'decoder_input_tokens': (1, 4)}
  init = utils.TrainStateInitializer(
    optimizer if train else None,
    model.get_initial_variables,
    shapes,
    partitioner,
  )
  state = init.from_scratch(jax.random.PRNGKey(3))
  return init.global_train_state_shape, state.replace_step(jnp.asarray(STEP))


def cast(params, dtype):
  """Parameters rounded to `dtype`, as a flat dict of float32 arrays."""
  flat = traverse_util.flatten_dict(jax.device_get(dict(params)), sep='/')
  dtype = jnp.dtype(dtype)
  return {k: np.asarray(x, dtype).astype('float32') for k, x in flat.items()}


def assert_equal(got, want, dtype='float32'):
  got, want = cast(got, 'float32'), cast(want, dtype)
  assert got.keys() == want.keys()
  for name, x in want.items():
    np.testing.assert_array_equal(got[name], x, err_msg=name)


def t5x_save(layout, directory, shapes, partitioner, state, dtype):
  """Has T5X write checkpoint_1000, and returns the path."""
  if layout == 'legacy':
    t5x_checkpoints.Checkpointer(
      shapes, partitioner, str(directory), save_dtype=jnp.dtype(dtype)
    ).save(state)
  else:
    # T5X ignores save_dtype with Orbax.
    params = jax.tree.map(lambda x: x.astype(dtype), state.params)
    manager = t5x_checkpoints.OrbaxCheckpointManagerInterface(
      str(directory), shapes, partitioner
    )
    manager.save(state.replace_params(params))
    manager.wait_until_finished()
    manager.close()
  return directory / f'checkpoint_{STEP}'


def t5x_restore(layout, path, shapes, partitioner, dtype):
  if layout == 'legacy':
    make = t5x_checkpoints.Checkpointer
    make = functools.partial(make, checkpoints_dir=str(path.parent))
  else:
    make = t5x_checkpoints.OrbaxCheckpointManagerInterface
    make = functools.partial(make, directory=str(path.parent))
  manager = make(
    train_state=shapes, partitioner=partitioner, restore_dtype=jnp.dtype(dtype)
  )
  return manager.restore(path=str(path))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('layout', ['legacy', 'orbax'])
@pytest.mark.parametrize('train', [False, True], ids=['infer', 'train'])
def test_reads_what_t5x_writes(tmp_path, partitioner, layout, dtype, train):
  shapes, state = fresh(partitioner, train=train)
  path = t5x_save(layout, tmp_path, shapes, partitioner, state, dtype)
  for config in (CONFIG, MODULE.config):  # ours, and T5X's own
    assert_equal(checkpoints.load(path, config), state.params, dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
  'saver, reader',
  [
    (checkpoints.save_t5x_legacy, 'legacy'),
    (checkpoints.save_t5x_legacy, 'orbax'),  # which hands it to the former
    (checkpoints.save_t5x_orbax, 'orbax'),
  ],
)
def test_t5x_restores_what_is_written_here(
  tmp_path, partitioner, saver, reader, dtype
):
  shapes, state = fresh(partitioner)
  params = state.params
  saver(tmp_path, dict(params), STEP, dtype=dtype)
  path = tmp_path / f'checkpoint_{STEP}'
  for restored_as in DTYPES if dtype == 'bfloat16' else ['float32']:
    state = t5x_restore(reader, path, shapes, partitioner, restored_as)
    assert int(state.step) == STEP
    kinds = {x.dtype for x in jax.tree.leaves(state.params)}
    assert kinds == {jnp.dtype(restored_as)}
    assert_equal(state.params, params, dtype)


def test_logits_of_a_restored_model(tmp_path, partitioner):
  """T5X's network and ours, each with what it read from one checkpoint."""
  shapes, state = fresh(partitioner)
  checkpoints.save_t5x_orbax(tmp_path, dict(state.params), STEP)
  path = tmp_path / f'checkpoint_{STEP}'
  state = t5x_restore('orbax', path, shapes, partitioner, 'float32')
  rng = np.random.default_rng(0)
  inputs = rng.integers(1, 50, (3, 12))
  inputs[1, 7:] = inputs[2, 3:] = 0
  targets = rng.integers(1, 50, (3, 10))
  decoder_inputs = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
  # T5X masks the keys whose targets are 0: here none is.
  args = inputs, decoder_inputs, targets

  @functools.partial(jax.jit, static_argnums=0)
  def logits(module, params):
    return module.apply({'params': params}, *args, enable_dropout=False)

  want = logits(MODULE, state.params)
  got = logits(transformer.Transformer(CONFIG), checkpoints.load(path, CONFIG))
  assert want.std() > 0.1
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  print('largest difference', np.abs(got - want).max())


@pytest.mark.parametrize('layout', ['legacy', 'orbax'])
def test_scanned_layers_of_t5x_are_refused(tmp_path, partitioner, layout):
  module = scalable_network.Transformer(
    scalable_network.T5Config(**SIZES, dropout_rate=0.0)
  )
  shapes, state = fresh(partitioner, module)
  path = t5x_save(layout, tmp_path, shapes, partitioner, state, 'float32')
  with pytest.raises(ValueError, match='holds scanned layers: (en|de)coder/'):
    checkpoints.load(path, CONFIG)
