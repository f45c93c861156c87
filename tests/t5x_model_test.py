# SPDX-License-Identifier: Apache-2.0
"""Speculation inside T5X, against T5X's own decoding of the same checkpoints.

Needs t5x, which is not on PyPI, on the Python path.
"""

import copy
import dataclasses
import functools
import json
import pathlib

import chi_squared
from flax import traverse_util
import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
from t5x import decoding
from t5x import eval as t5x_eval
from t5x import infer
from t5x import models
from t5x import partitioning
from t5x import utils
from t5x.examples.t5 import network
import t5x_checkpoints_test as written
import tensorflow as tf
import toy_models

from spec_decode import drafts
from spec_decode import randomness
from spec_decode import sampling as sampling_lib
from spec_decode import speculative
from spec_decode.autoregressive import Limits
from spec_decode.data import text
from spec_decode.models import checkpoints
from spec_decode.models import ngram
from spec_decode.models import t5x_checkpoints
from spec_decode.models import t5x_model
from spec_decode.models import transformer
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation

VOCABULARY = seqio.PassThroughVocabulary(24, eos_id=1)
SIZES = toy_models.T5_SIZES | {'vocab_size': 24, 'dropout_rate': 0.0}
TARGET = network.T5Config(**SIZES)
TASK, EXAMPLES, BATCH, LENGTHS = 'toy', 10, 4, {'inputs': 8, 'targets': 9}
STEP = 1000


def rows(count=EXAMPLES, width=LENGTHS['inputs'], seed=0):
  """Inputs of all lengths, no two alike, padded with 0."""
  rng = np.random.default_rng(seed)
  inputs = rng.integers(2, 24, (count, width))
  length = 2 + np.arange(count) % (width - 1)
  return np.where(np.arange(width) < length[:, None], inputs, 0)


def _source(split, shuffle_files, seed=None):
  del split, shuffle_files, seed
  inputs = tf.RaggedTensor.from_tensor(rows().astype(np.int32), padding=0)
  dataset = tf.data.Dataset.from_tensor_slices(inputs)
  return dataset.map(lambda x: {'inputs': x, 'targets': x[::-1]})


# What the task's metric was given.
DECODED = []


def _remember(targets, predictions):
  DECODED.extend(predictions)
  return {'examples': len(targets)}


@pytest.fixture(scope='module', autouse=True)
def _task():
  seqio.TaskRegistry.add(
    TASK,
    source=seqio.FunctionDataSource(_source, splits=['test']),
    preprocessors=[seqio.preprocessors.append_eos_after_trim],
    metric_fns=[_remember],
    output_features={
      'inputs': seqio.Feature(VOCABULARY, add_eos=False),
      'targets': seqio.Feature(VOCABULARY),
    },
  )
  yield
  seqio.TaskRegistry.remove(TASK)


@pytest.fixture(scope='module', autouse=True)
def _compile_once(tmp_path_factory):
  """Every run of `infer` makes its program anew: keep compiled ones."""
  settings = {
    'jax_compilation_cache_dir': str(tmp_path_factory.mktemp('compiled')),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
  }
  old = {name: getattr(jax.config, name) for name in settings}
  for values in (settings, old):
    for name, value in values.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()
    if values is settings:
      yield


@pytest.fixture(scope='module')
def params():
  """Of a target and of a draft that often agrees with it."""
  target = toy_models.t5_params(TARGET, 0)
  return {'target': target, 'draft': toy_models.perturbed(target, 1, 0.1)}


@pytest.fixture(scope='module')
def paths(params, tmp_path_factory):
  """The target in legacy layout, the draft in Orbax's."""
  folder = tmp_path_factory.mktemp('checkpoints')
  checkpoints.save_t5x_legacy(folder / 'target', params['target'], STEP)
  checkpoints.save_t5x_orbax(folder / 'draft', params['draft'], STEP)
  return {
    half: str(folder / half / f'checkpoint_{STEP}')
    for half in ('target', 'draft')
  }


@functools.cache
def make(draft=None, **changes):
  """A model; the same one for the same arguments."""
  settings = {'gamma': 3, 'layout': 'fused'} | changes
  return t5x_model.SpeculativeEncoderDecoderModel(
    transformer.Transformer(TARGET),
    VOCABULARY,
    VOCABULARY,
    draft
    or t5x_model.NetworkDraft(transformer.Transformer(TARGET), VOCABULARY),
    **settings,
  )


@functools.cache
def predictor(model, **options):
  return jax.jit(functools.partial(model.predict_batch_with_aux, **options))


def batch_of(inputs, targets=None, length=LENGTHS['targets']):
  """What T5X's feature converter makes."""
  if targets is None:
    targets = np.ones((len(inputs), length), np.int32)
  return {
    'encoder_input_tokens': jnp.asarray(inputs),
    'decoder_input_tokens': jnp.asarray(np.pad(targets, ((0, 0), (1, 0))))[
      :, :-1
    ],
    'decoder_target_tokens': jnp.asarray(targets),
    'decoder_loss_weights': jnp.asarray(targets > 0, jnp.float32),
  }


@functools.cache
def stock():
  decode = functools.partial(decoding.temperature_sample, temperature=0.0)
  return models.EncoderDecoderModel(
    network.Transformer(TARGET), VOCABULARY, VOCABULARY, None, decode
  )


# --- the network --------------------------------------------------------------


@pytest.mark.parametrize('tied', [False, True], ids=['1.1', '1.0'])
def test_chunks_score_as_stock_tokens_do(tied):
  """Logits of our chunks with junk in between, and of T5X's one by one."""
  change = {'mlp_activations': ('relu',), 'logits_via_embedding': True}
  config = network.T5Config(**(SIZES | (change if tied else {})))
  params = toy_models.t5_params(config, 3)
  theirs, inputs, width = network.Transformer(config), rows(3), 12
  tokens = np.random.default_rng(1).integers(0, 24, (3, width))

  @jax.jit
  def start(params):
    ones = jnp.ones((3, width), jnp.int32)
    _, cache = theirs.apply(
      {'params': params}, jnp.asarray(inputs), ones, ones,
      decode=True, enable_dropout=False, mutable=['cache'],
    )  # fmt: skip
    encoded = theirs.apply(
      {'params': params}, jnp.asarray(inputs), enable_dropout=False,
      method='encode',
    )  # fmt: skip
    return cache, encoded

  @jax.jit
  def one(params, cache, encoded, token):
    return theirs.apply(
      {'params': params} | cache, encoded, inputs, token, token, decode=True,
      enable_dropout=False, max_decode_length=width, mutable=['cache'],
      method='decode',
    )  # fmt: skip

  cache, encoded = start(params)
  want = []
  for i in range(width):
    logits, cache = one(params, cache, encoded, tokens[:, i : i + 1])
    want.append(logits[:, 0])

  model = transformer.language_model(config)

  @jax.jit
  def extend(params, cache, chunk, position):
    hidden, cache = model.extend(params, cache, chunk, position)
    return model.logits(params, hidden), cache

  ours = jax.jit(model.start, static_argnums=2)(params, inputs, width + 4)
  at, got = np.zeros(3, int), np.zeros((3, width, 24), np.float32)
  rng = np.random.default_rng(2)
  while (at < width).any():
    index = np.minimum(at[:, None] + np.arange(4), width - 1)
    kept = rng.integers(1, 5, 3)
    # What is not kept is junk, which the next chunk has to overwrite.
    chunk = np.take_along_axis(tokens, index, axis=1)
    chunk = np.where(np.arange(4) < kept[:, None], chunk, 7)
    logits, ours = extend(params, ours, chunk, at)
    for row in range(3):
      stop = min(at[row] + kept[row], width)
      got[row, at[row] : stop] = logits[row, : stop - at[row]]
    at = np.minimum(at + kept, width)
  np.testing.assert_allclose(got, np.stack(want, 1), rtol=0, atol=1e-5)


# --- the model ----------------------------------------------------------------


def test_greedy_tokens_are_those_of_stock(params):
  inputs = rows(12, seed=4)
  tokens, aux = predictor(make())(params, batch_of(inputs))
  want = jax.jit(stock().predict_batch)(params['target'], batch_of(inputs))
  np.testing.assert_array_equal(tokens, want)
  counts = aux['speculative']
  # Guesses of every fate, or this would say little.
  assert (np.sum(counts['histogram'], 0) > 0).all()
  assert len(set(counts['num_tokens'].tolist())) > 1
  offsets = np.arange(4) * counts['histogram']
  np.testing.assert_array_equal(offsets.sum(1), counts['accepted'])
  np.testing.assert_array_equal(
    counts['histogram'].sum(1), counts['target_calls']
  )


def test_prompts_go_on_as_in_stock(params):
  inputs, targets = rows(8, seed=5), np.zeros((8, 9), np.int32)
  targets[:, :8] = rows(8, 8, seed=6)
  lengths = (targets > 0).sum(1)
  targets[np.arange(8), lengths] = VOCABULARY.eos_id
  batch = batch_of(inputs, targets)
  tokens, aux = predictor(make(), prompt_with_targets=True)(params, batch)
  theirs = functools.partial(stock().predict_batch_with_aux, rng=None)
  theirs = functools.partial(theirs, prompt_with_targets=True)
  want, _ = jax.jit(theirs)(params['target'], batch)
  np.testing.assert_array_equal(tokens, want)
  given = np.arange(9) < lengths[:, None]
  np.testing.assert_array_equal(np.asarray(tokens)[given], targets[given])
  assert (aux['speculative']['num_tokens'] <= 9 - lengths).all()


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_scores_are_those_of_score_mode(params, temperature):
  model, inputs = make(temperature=temperature), rows(12, seed=4)
  tokens, aux = predictor(model)(params, batch_of(inputs))
  batch = batch_of(inputs, np.asarray(tokens))
  # Score mode leaves out ids 0, so rows that drew one cannot be compared.
  length = np.asarray(aux['speculative']['num_tokens'])
  whole = (np.asarray(tokens) > 0).sum(1) == length
  assert whole.sum() >= 6
  for scored in (
    jax.jit(model.score_batch)(params, batch),
    jax.jit(stock().score_batch)(params['target'], batch),
  ):
    np.testing.assert_allclose(
      aux['scores'][whole], scored[whole], rtol=0, atol=1e-4
    )


def test_samples_follow_the_law_of_the_target(params):
  """Every sequence of two tokens, against stock T5X's own probabilities."""
  count, row = 6000, rows(1, seed=10)
  sampling = Sampling(1.0, top_k=3, forbidden=())
  model = make(temperature=1.0, gamma=2, top_k=3)
  tokens, aux = predictor(model, num_decodes=count, return_all_decodes=True)(
    params, batch_of(row, length=2)
  )
  assert tokens.shape == (1, count, 2)
  assert (np.sum(aux['speculative']['histogram'], (0, 1)) > 0).all()

  first = np.arange(24)
  logits = network.Transformer(TARGET).apply(
    {'params': params['target']},
    np.repeat(row, 24, axis=0),
    np.stack([0 * first, first], 1),
    np.ones((24, 2), int),  # stock would mask targets that are 0
    enable_dropout=False,
  )
  p = np.asarray(sampling_lib.distribution(logits, sampling), np.float64)
  law = {
    (a, b): p[0, 0, a] * p[a, 1, b]
    for a in range(24)
    for b in range(24)
    if a != VOCABULARY.eos_id
  }
  law[VOCABULARY.eos_id, 0] = p[0, 0, VOCABULARY.eos_id]
  chi_squared.assert_follows(list(map(tuple, np.asarray(tokens)[0])), law)


def test_lenience_and_the_drafts_own_sampling_are_those_of_the_loop(params):
  own, inputs = Sampling(0.5, top_k=4, forbidden=()), rows(12, seed=4)
  model = make(temperature=1.0, draft_sampling=own, lenience=0.5)
  tokens, aux = predictor(model)(params, batch_of(inputs))
  network_of_both = transformer.language_model(TARGET, 24, 'fused')
  config = Speculation(
    network_of_both,
    drafts.ModelDraft(network_of_both, own, 3),
    Sampling(1.0, forbidden=()),
    Limits(LENGTHS['targets'], VOCABULARY.eos_id),
    lenience=0.5,
  )
  keys = randomness.row_keys(0, randomness.hash_ids(jnp.asarray(inputs)))
  want = speculative.decode(
    config,
    *(network_of_both.prepare(params[half]) for half in ('target', 'draft')),
    inputs,
    jax.vmap(jax.random.fold_in, (0, None))(keys, 0),
  )
  np.testing.assert_array_equal(tokens, want.tokens)
  for name in ('tested', 'accepted'):
    np.testing.assert_array_equal(
      aux['speculative'][name], getattr(want, name), name
    )


def test_decodes_come_in_the_order_of_their_scores(params):
  settings = {'num_decodes': 4, 'return_all_decodes': True}
  model = make(temperature=1.0, **settings)
  batch, everything = batch_of(rows(3, seed=11)), predictor(model)
  tokens, aux = everything(params, batch)
  assert tokens.shape == (3, 4, 9)
  assert aux['speculative']['histogram'].shape == (3, 4, 4)
  assert (np.diff(aux['scores'], axis=1) >= 0).all()
  decodes = {tuple(row) for row in np.asarray(tokens).reshape(12, 9)}
  assert len(decodes) > 8  # not copies of each other
  # Samples belong to rows, wherever these stand.
  again, _ = everything(params, batch_of(rows(3, seed=11)[::-1]))
  np.testing.assert_array_equal(again, tokens[::-1])
  best, aux_of_best = predictor(model, return_all_decodes=False)(params, batch)
  np.testing.assert_array_equal(best, tokens[:, -1])
  np.testing.assert_array_equal(aux_of_best['scores'], aux['scores'][:, -1])


def test_what_cannot_work_is_refused_when_it_is_made():
  module = transformer.Transformer(TARGET)
  build = functools.partial(
    t5x_model.SpeculativeEncoderDecoderModel, module, VOCABULARY, VOCABULARY
  )
  draft = t5x_model.NetworkDraft
  with pytest.raises(ValueError, match='draft.module to be spec_decode'):
    build(draft(network.Transformer(TARGET), VOCABULARY), gamma=2)
  with pytest.raises(ValueError, match='one vocabulary'):
    other = seqio.PassThroughVocabulary(23, eos_id=1)
    build(draft(module, other), gamma=2)
  with pytest.raises(ValueError, match='to know the 24 ids'):
    small = transformer.Transformer(network.T5Config(vocab_size=23))
    build(draft(small, VOCABULARY), gamma=2)
  with pytest.raises(ValueError, match='lenience'):
    build(draft(module, VOCABULARY), gamma=2, lenience=2.0)
  with pytest.raises(ValueError, match='num_decodes to be at least 1, got 0'):
    build(draft(module, VOCABULARY), gamma=2, num_decodes=0)
  for name, value in (
    ('decode_fn', decoding.beam_search),
    ('default_decoder_params', models.DecoderParams(num_decodes=4)),
  ):
    with pytest.raises(ValueError, match=f'no {name}.* such as temperature'):
      build(draft(module, VOCABULARY), gamma=2, **{name: value})


def test_vocabularies_are_compared_by_content(tmp_path):
  """Equal are those with the same pieces at the same ids."""
  shipped = str(text.ASSETS / 'debian' / 'vocab.model')
  read = seqio.SentencePieceVocabulary
  added = read(shipped, 100)
  baked = tmp_path / 'elsewhere.model'
  baked.write_bytes(added.sp_model)
  baked = read(str(baked))
  assert baked != added  # to SeqIO, which asks for the path
  assert t5x_model.content(baked) == t5x_model.content(added)
  ascending = read(shipped, 100, reverse_extra_ids=False)
  for other in (read(shipped), read(shipped, 99), ascending):
    assert t5x_model.content(other) != t5x_model.content(added)


def test_a_task_of_another_vocabulary_is_refused():
  model, other = make(), seqio.PassThroughVocabulary(23, eos_id=1)
  t5x_model.verify_vocabularies(dataset(), model)
  for side in ('input', 'output'):
    changed = copy.copy(model)
    setattr(changed, f'_{side}_vocabulary', other)
    with pytest.raises(ValueError) as error:
      t5x_model.verify_vocabularies(dataset(), changed)
    want = f'{TASK} and model to have one {side} vocabulary, got {VOCABULARY}'
    assert f'{want} and {other}.' in str(error.value)


def test_a_shortlist_changes_no_output(params, tmp_path):
  batch = batch_of(rows())
  want = jax.jit(stock().predict_batch)(params['target'], batch)
  path = str(tmp_path / 'counted.safetensors')
  ngram.save(path, ngram.count(np.asarray(want).tolist(), 24, order=1))
  network = transformer.Transformer(TARGET)
  short = t5x_model.NetworkDraft(
    network, VOCABULARY, shortlist=6, frequencies=path
  )
  accepted = []
  for draft in (None, short):
    tokens, aux = predictor(make.__wrapped__(draft))(params, batch)
    np.testing.assert_array_equal(tokens, want)
    accepted.append(int(np.sum(aux['speculative']['accepted'])))
  assert 0 < accepted[1] < accepted[0]
  for wrong, message in (
    ({'frequencies': None}, 'Expected frequencies with the shortlist of 6'),
    ({'shortlist': 25}, 'Expected 1 to 24 of the ids'),
  ):
    with pytest.raises(ValueError, match=message):
      make.__wrapped__(dataclasses.replace(short, **wrong))


def test_tables_of_another_vocabulary_are_refused(tmp_path):
  shipped = text.Vocabulary()
  path = str(tmp_path / 'tables.safetensors')
  ngram.save(
    path, ngram.count([[1]], 8, 1), {'vocabulary': shipped.fingerprint}
  )
  draft = t5x_model.NGramDraft(path)
  draft.check_vocabulary(seqio.SentencePieceVocabulary(shipped.path))
  more = seqio.SentencePieceVocabulary(shipped.path, 100)
  for other in (more, VOCABULARY):
    with pytest.raises(ValueError) as error:
      draft.check_vocabulary(other)
    counted = f'{path} was counted with (sha256 {shipped.fingerprint[:12]}'
    assert counted in str(error.value)
    assert f'got {other}' in str(error.value)


# --- checkpoints --------------------------------------------------------------


def restore(config, paths, partitioner, draft=None, dtype='float32'):
  """What T5X's own function restores through our manager."""
  vocabulary = seqio.PassThroughVocabulary(config.vocab_size, eos_id=1)
  model = t5x_model.SpeculativeEncoderDecoderModel(
    transformer.Transformer(config),
    vocabulary,
    vocabulary,
    draft
    or t5x_model.NetworkDraft(transformer.Transformer(config), vocabulary),
    gamma=2,
  )
  shapes = {'encoder_input_tokens': (1, 4), 'decoder_input_tokens': (1, 4)}
  manager = functools.partial(
    t5x_checkpoints.SpeculativeCheckpointManager, draft_path=str(paths['draft'])
  )
  state, _ = utils.create_checkpoint_manager_and_restore(
    utils.TrainStateInitializer(
      None, model.get_initial_variables, shapes, partitioner
    ),
    partitioner,
    utils.RestoreCheckpointConfig(
      str(paths['target']),
      'specific',
      dtype=dtype,
      checkpoint_manager_cls=manager,
    ),
    str(paths['target']),
    None,
    use_orbax=True,
  )
  return state


@pytest.mark.parametrize(
  'target, draft, restored_as',
  [
    (('legacy', 'float32'), ('orbax', 'bfloat16'), 'float32'),
    (('orbax', 'bfloat16'), ('legacy', 'float32'), 'bfloat16'),
  ],
)
def test_checkpoints_mix(tmp_path, partitioner, target, draft, restored_as):
  paths, want = {}, {}
  for half, (layout, dtype) in (('target', target), ('draft', draft)):
    # With an optimizer's state, which is not to be read.
    shapes, state = written.fresh(partitioner, train=True)
    (tmp_path / half).mkdir()
    paths[half] = written.t5x_save(
      layout, tmp_path / half, shapes, partitioner, state, dtype
    )
    want[half] = written.cast(state.params, dtype)
  state = restore(written.CONFIG, paths, partitioner, dtype=restored_as)
  assert int(state.step) == written.STEP
  kinds = {x.dtype for x in jax.tree.leaves(state.params)}
  assert kinds == {jnp.dtype(restored_as)}
  for half, arrays in want.items():
    written.assert_equal(
      state.params[half], traverse_util.unflatten_dict(arrays, sep='/'),
      restored_as,
    )  # fmt: skip


@pytest.mark.parametrize(
  'save', [checkpoints.save_t5x_legacy, checkpoints.save_t5x_orbax]
)
def test_a_draft_of_another_width_is_refused(
  tmp_path, params, paths, partitioner, save
):
  wide = toy_models.t5_params(network.T5Config(**(SIZES | {'emb_dim': 20})), 0)
  del wide['decoder']['layers_0']['mlp']['wi_1']
  save(tmp_path, wide, STEP)
  wrong = paths | {'draft': tmp_path / f'checkpoint_{STEP}'}
  with pytest.raises(ValueError) as error:
    restore(TARGET, wrong, partitioner)
  message = str(error.value)
  assert 'missing: decoder/layers_0/mlp/wi_1/kernel' in message
  assert 'token_embedder/embedding, expected (24, 16), got (24, 20)' in message
  assert message.count('wrong: ') > 20


def test_a_draft_that_is_not_there_is_refused(paths, partitioner, tmp_path):
  with pytest.raises(FileNotFoundError, match='nowhere'):
    restore(TARGET, paths | {'draft': tmp_path / 'nowhere'}, partitioner)
  above = pathlib.Path(paths['draft']).parent
  with pytest.raises(ValueError, match='Name one of its checkpoint_N'):
    restore(TARGET, paths | {'draft': above}, partitioner)


def test_a_draft_of_another_kind_is_refused(
  params, paths, partitioner, tmp_path
):
  network_file, tables, others = (
    str(tmp_path / f'{name}.safetensors') for name in ('net', 'two', 'three')
  )
  checkpoints.save(network_file, params['draft'])
  for path, order in ((tables, 2), (others, 3)):
    ngram.save(path, ngram.count([[2, 3, 4, 5]], 24, order))
  for path in (network_file, tables):
    with pytest.raises(ValueError) as error:
      restore(TARGET, paths | {'draft': path}, partitioner)
    for part in (f'got {path}', 'convert_to_t5x.gin', 'draft_ngram.gin'):
      assert part in str(error.value)
  with pytest.raises(ValueError, match='the tables of the draft') as error:
    draft = t5x_model.NGramDraft(tables)
    restore(TARGET, paths | {'draft': others}, partitioner, draft)
  assert f'in {others}' in str(error.value)


# --- infer and eval -----------------------------------------------------------


@pytest.fixture(scope='module')
def partitioner():
  return partitioning.PjitPartitioner(num_partitions=1)


def dataset(batch=BATCH):
  return utils.DatasetConfig(
    TASK, LENGTHS, 'test', batch, shuffle=False, seed=0
  )


def restoring(paths):
  return utils.RestoreCheckpointConfig(
    paths['target'],
    'specific',
    dtype='float32',
    checkpoint_manager_cls=functools.partial(
      t5x_checkpoints.SpeculativeCheckpointManager, draft_path=paths['draft']
    ),
  )


def run(model, paths, partitioner, folder, mode='predict_with_aux', **changes):
  """`t5x.infer`, and the lines that it leaves."""
  folder.mkdir(exist_ok=True)
  settings = {'checkpoint_period': 1, 'checkpoint_ds_iter': False} | changes
  infer.infer(
    mode=mode,
    model=model,
    dataset_cfg=dataset(),
    restore_checkpoint_cfg=restoring(paths),
    partitioner=partitioner,
    output_dir=str(folder),
    summarize_config_fn=lambda **_: None,
    verify_matching_vocabs_fn=t5x_model.verify_vocabularies,
    **settings,
  )
  files = sorted(folder.glob(f'{TASK}-{mode}.jsonl-*-of-0000?'))
  return [
    json.loads(line) for path in files for line in path.read_text().splitlines()
  ]


def write(path, inferences, task_ds, mode, vocabulary=None):
  """T5X's writer, with ids instead of text, that PassThrough cannot make."""
  del mode, vocabulary
  tokens, aux = inferences
  with open(path, 'w') as file:
    for i, example in task_ds.enumerate().as_numpy_iterator():
      line = {
        'inputs': example['inputs'].tolist(),
        'tokens': np.asarray(tokens[i]).tolist(),
      }
      if aux:
        aux_i = jax.tree.map(
          lambda x, i=i: np.asarray(x[i]).tolist(),
          aux,
          is_leaf=lambda x: isinstance(x, list | np.ndarray),
        )
        line |= {'scores': aux_i['scores'], **aux_i['speculative']}
      file.write(json.dumps(line) + '\n')


def test_shards_and_restarts_give_the_samples_of_one_batch(
  params, paths, partitioner, tmp_path
):
  model = make(temperature=1.0)
  start = functools.partial(run, model, paths, partitioner)
  calls = []

  def killed(path, *args):
    calls.append(path)
    if len(calls) == 2:
      raise KeyboardInterrupt
    write(path, *args)

  shard = {'num_shards': 2, 'shard_id': 0}
  with pytest.raises(KeyboardInterrupt):
    start(tmp_path / 'shards', write_fn=killed, **shard)
  assert not list((tmp_path / 'shards').glob('*.COMPLETED'))
  start(tmp_path / 'shards', write_fn=write, **shard)
  lines = start(tmp_path / 'shards', write_fn=write, num_shards=2, shard_id=1)
  assert len(calls) == 2 and len(lines) == EXAMPLES
  # One batch of all rows, without T5X around it.
  tokens, aux = predictor(model)(params, batch_of(rows()))
  order = [*range(0, EXAMPLES, 2), *range(1, EXAMPLES, 2)]
  want = {'tokens': tokens, 'inputs': rows(), **aux['speculative']}
  for name, values in want.items():
    got = [line[name] for line in lines]
    if name == 'inputs':
      got = text.pad(got, LENGTHS['inputs']).tolist()
    assert got == np.asarray(values)[order].tolist(), name
  scores = [line['scores'] for line in lines]
  np.testing.assert_allclose(scores, aux['scores'][jnp.array(order)], rtol=1e-5)


@pytest.mark.parametrize('mode', ['predict', 'score'])
def test_modes_without_counts_are_those_of_stock(
  params, paths, partitioner, tmp_path, mode
):
  lines = run(make(), paths, partitioner, tmp_path, mode, write_fn=write)
  assert [set(line) for line in lines] == [{'inputs', 'tokens'}] * EXAMPLES
  inputs = rows()
  reversed_inputs = [[*row[row > 0][::-1], VOCABULARY.eos_id] for row in inputs]
  batch = batch_of(inputs, text.pad(reversed_inputs, LENGTHS['targets']))
  step = getattr(stock(), f'{mode}_batch')
  want = jax.jit(step)(params['target'], batch)
  got = [line['tokens'] for line in lines]
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_n_gram_tables_need_no_second_network(
  params, paths, partitioner, tmp_path
):
  batch = batch_of(rows())
  want = jax.jit(stock().predict_batch)(params['target'], batch)
  path = str(tmp_path / 'tables.safetensors')
  # Counted on the outputs themselves, so that some guesses are right.
  ngram.save(path, ngram.count(np.asarray(want).tolist(), 24, order=3))
  model = make(t5x_model.NGramDraft(path))
  lines = run(
    model, paths | {'draft': path}, partitioner, tmp_path / 'out',
    write_fn=write,
  )  # fmt: skip
  assert [line['tokens'] for line in lines] == np.asarray(want).tolist()
  assert sum(line['accepted'] for line in lines) > 10


def test_eval_scores_what_is_decoded(params, paths, partitioner, tmp_path):
  DECODED.clear()
  evaluator = functools.partial(
    seqio.Evaluator, logger_cls=[], num_examples=None, use_memory_cache=False
  )
  t5x_eval.evaluate(
    model=make(),
    dataset_cfg=dataset(),
    restore_checkpoint_cfg=restoring(paths),
    partitioner=partitioner,
    output_dir=str(tmp_path),
    inference_evaluator_cls=evaluator,
    summarize_config_fn=lambda **_: None,
  )
  want = jax.jit(stock().predict_batch)(params['target'], batch_of(rows()))
  np.testing.assert_array_equal(text.pad(DECODED, 9), want)
