# SPDX-License-Identifier: Apache-2.0
"""The T5 network: its cache, its biases, its sizes."""

import ast
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models

from spec_decode.language_model import PARKED
from spec_decode.models import kv_cache
from spec_decode.models import layers
from spec_decode.models import transformer
from spec_decode.models.transformer import Transformer

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs' / 'models'
# Of the decoder tokens in most tests, which then share compiled programs.
LENGTH = 16
KINDS = {'1.0': toy_models.TINY_TIED_T5, '1.1': toy_models.TINY_T5}


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(config, params, inputs, tokens):
  """Logits after each of `tokens`, in one pass."""
  return Transformer(config).apply(
    {'params': params}, inputs, tokens, enable_dropout=False
  )


@functools.partial(jax.jit, static_argnums=(0, 3))
def start(model, params, inputs, capacity):
  return model.start(params, inputs, capacity)


@functools.partial(jax.jit, static_argnums=0)
def feed(model, params, cache, tokens, position):
  """Logits after each token of a chunk, and the cache."""
  hidden, cache = model.extend(params, cache, tokens, position)
  return model.logits(params, hidden), cache


def batch(rows, inputs, length, seed=0):
  """Input ids, padded to uneven lengths, and decoder tokens, some of id 0."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(1, 50, (rows, inputs))
  for row in range(1, rows):
    ids[row, inputs - row :] = 0
  tokens = rng.integers(0, 50, (rows, length))
  tokens[:, [0, 3]] = 0
  return jnp.asarray(ids, jnp.int32), tokens.astype(np.int32)


@pytest.mark.parametrize(
  'kind, layout',
  [('1.0', 'fused'), ('1.1', 'checkpoint'), ('1.1', 'fused')],
)
def test_cached_chunks_equal_one_pass(kind, layout):
  # Far enough for distances beyond 128, where the bias has one bucket.
  config, length = KINDS[kind], 150
  params = toy_models.t5_params(config, 0)
  inputs, tokens = batch(3, 7, length)
  exact = np.asarray(teacher_forced(config, params, inputs, tokens))
  assert np.ptp(exact, axis=-1).min() > 1
  model = transformer.language_model(config, None, layout)
  params = model.prepare(params)
  cache = start(model, params, inputs, length)
  toy_models.assert_chunks_equal_one_pass(
    feed, model, params, cache, tokens, exact
  )


@pytest.mark.parametrize(
  'inputs, outputs',
  [
    (40, 24),
    (40, layers._MANY_OUTPUTS),
    (layers._MANY_INPUTS, 24),
    (layers._MANY_INPUTS_FOR_ONE, 24),
  ],
)
def test_products_of_few_rows(inputs, outputs):
  rng = np.random.default_rng(4)
  kernel = rng.normal(size=(inputs, outputs)).astype(np.float32)
  stored = layers.few_rows_kernel(kernel)
  turned = inputs >= layers._MANY_INPUTS
  assert stored.shape == (kernel.T if turned else kernel).shape
  for shape in [(1, 1), (1, 2), (3, 1), (1, 5), (3, 3), (2, 8)]:
    x = rng.normal(size=(*shape, inputs)).astype(np.float32)
    for function in (layers.few_rows_product, jax.jit(layers.few_rows_product)):
      product = function(jnp.asarray(x), stored)
      np.testing.assert_allclose(product, x @ kernel, atol=1e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_wide_decoders_turn_their_kernels(kind):
  config = KINDS[kind].replace(emb_dim=layers._MANY_INPUTS)
  params = toy_models.t5_params(config, 11)
  model = transformer.language_model(config, None, 'fused')
  prepared = model.prepare(params)
  kernel = prepared['decoder']['logits_dense']['kernel']
  assert kernel.shape == (config.vocab_size, config.emb_dim)
  inputs, tokens = batch(3, 7, LENGTH)
  exact = np.asarray(teacher_forced(config, params, inputs, tokens))
  cache, at, logits = start(model, prepared, inputs, LENGTH), 0, []
  for width in (1, 4, 6, 5):
    chunk = tokens[:, at : at + width]
    some, cache = feed(model, prepared, cache, chunk, np.full(3, at))
    logits.append(some)
    at += width
  assert at == LENGTH
  error = np.concatenate(logits, axis=1) - exact
  assert np.abs(error).max() < 1e-5 * exact.std()


def test_any_chunking_leaves_the_same_cache():
  config = toy_models.TINY_T5
  model = transformer.language_model(config)
  params = toy_models.t5_params(config, 2)
  inputs, tokens = batch(3, 7, LENGTH)
  empty = start(model, params, inputs, LENGTH)
  _, whole = feed(model, params, empty, tokens, np.zeros(3, int))
  cache = empty
  for at in range(0, LENGTH, 4):
    junk = np.full((3, 4), 9)
    _, cache = feed(model, params, cache, junk, np.array([at, at + 2, at + 5]))
    chunk = tokens[:, at : at + 4]
    _, cache = feed(model, params, cache, chunk, np.full(3, at))
  for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(whole)):
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_writes_outside_the_cache_are_dropped():
  heads, length, width, size = 2, 10, 4, 3
  rng = np.random.default_rng(3)
  position = np.array([0, 5, 6, 8, 9, 10, 11, PARKED, -2, -PARKED])
  rows = len(position) * heads
  caches = rng.normal(size=(2, rows, length, size)).astype(np.float32)
  chunks = rng.normal(size=(2, rows, width, size)).astype(np.float32)
  good = caches.copy()
  for row in range(rows):
    first = position[row // heads]
    for i in range(width):
      if first >= 0 and first + i < length:
        good[:, row, first + i] = chunks[:, row, i]
  transposed = lambda pair: (pair[0].mT, pair[1])  # keys, and values
  write = jax.jit(kv_cache.write)
  written = write(*transposed(caches), transposed(chunks), position)
  for one, other in zip(written, transposed(good)):
    np.testing.assert_array_equal(one, other)
  assert (good != caches).any(axis=(0, 2, 3)).sum() == 5 * heads


@pytest.mark.parametrize('position', [0, 9, 10, 11, -2, PARKED])
def test_a_single_entry_is_written_or_dropped(position):
  rng = np.random.default_rng(4)
  caches = rng.normal(size=(2, 1, 10, 3)).astype(np.float32)
  chunks = rng.normal(size=(2, 1, 1, 3)).astype(np.float32)
  good = caches.copy()
  if 0 <= position < 10:
    good[:, 0, position] = chunks[:, 0, 0]
  keys, values = jax.jit(kv_cache.write)(
    caches[0].mT, caches[1], (chunks[0].mT, chunks[1]), np.array([position])
  )
  np.testing.assert_array_equal(keys, good[0].mT)
  np.testing.assert_array_equal(values, good[1])


def test_running_past_the_end_leaves_earlier_entries_alone():
  config = toy_models.TINY_T5
  model = transformer.language_model(config)
  params = toy_models.t5_params(config, 4)
  inputs, tokens = batch(3, 7, LENGTH)
  cache = start(model, params, inputs, LENGTH)
  _, cache = feed(model, params, cache, tokens, np.zeros(3, int))
  position = np.array([LENGTH - 2, LENGTH, PARKED])
  chunk = (tokens[:, [-2, -1, 0, 1]] + 1) % 50  # what was there, plus 1
  logits, after = feed(model, params, cache, chunk, position)
  assert np.isfinite(logits).all()
  rows = np.arange(9).reshape(3, 3)  # a row of the batch has three heads
  keys = lambda cache: tuple(x.mT for x in cache.keys)
  for old, new in zip(keys(cache) + cache.values, keys(after) + after.values):
    np.testing.assert_array_equal(old[:, :-2], new[:, :-2])
    np.testing.assert_array_equal(old[rows[1:]], new[rows[1:]])
    assert (old[rows[0], -2:] != new[rows[0], -2:]).all()


def test_padding_changes_nothing():
  config = toy_models.TINY_T5
  params = toy_models.t5_params(config, 5)
  inputs, tokens = batch(3, 7, LENGTH)
  together = teacher_forced(config, params, inputs, tokens)
  real = inputs[2:, :5]
  assert (real > 0).all() and (inputs[2:, 5:] == 0).all()
  alone = teacher_forced(config, params, real, tokens[2:])
  np.testing.assert_allclose(alone[0], together[2], atol=1e-5)
  # What stands in the other rows does not matter, what is not padding does.
  other = teacher_forced(config, params, inputs.at[:2].set(7), tokens)
  np.testing.assert_allclose(other[2], together[2], atol=1e-5)
  other = teacher_forced(config, params, inputs.at[2, 5].set(7), tokens)
  assert np.abs(other[2] - together[2]).max() > 0.1


@pytest.mark.parametrize(
  'longest, width', [(1, 32), (33, 64), (64, 64), (65, 128), (128, 128)]
)
def test_padding_beyond_a_half_or_a_quarter_is_not_encoded(longest, width):
  config = toy_models.TINY_T5
  params = toy_models.t5_params(config, 4)
  inputs = np.zeros((3, 128), np.int32)
  inputs[:, :longest] = np.arange(longest) % 7 + 2
  inputs[0, longest // 2 :] = 0
  inputs[2, 0] = 0  # padding may stand anywhere
  model = transformer.language_model(config)
  cache = start(model, params, inputs, LENGTH)
  whole = Transformer(config).apply(
    {'params': params}, inputs, method=_all_keys_values
  )
  real = inputs > 0
  for i, (keys, values) in enumerate(whole):
    heads = config.num_heads
    shown = np.repeat(real, heads, axis=0)
    # Rows of one item: [B * H, I, D].
    for one, other in (
      (cache.cross_keys[i].mT, keys.mT), (cache.cross_values[i], values),
    ):  # fmt: skip
      np.testing.assert_allclose(one[shown], other[shown], atol=1e-5)
  assert not np.any(cache.cross_values[0][:, width:])
  assert np.any(cache.cross_values[0][:, width - 1])


def _all_keys_values(module, inputs):
  encoded = module.encode(inputs, enable_dropout=False)
  return module.decoder.cross_keys_values(encoded)


def test_packed_examples_equal_separate_ones():
  config = toy_models.TINY_T5
  params = toy_models.t5_params(config, 6)
  inputs, tokens = batch(3, 7, LENGTH, seed=7)
  inputs = jnp.where(inputs == 0, 8, inputs)  # no padding between examples
  separate = teacher_forced(config, params, inputs, tokens)
  ids = lambda width: np.repeat([[1, 2, 3]], width, axis=1)
  apply = jax.jit(Transformer(config).apply, static_argnames='enable_dropout')
  packed = apply(
    {'params': params},
    inputs.reshape(1, -1),
    tokens.reshape(1, -1),
    encoder_segment_ids=ids(7),
    decoder_segment_ids=ids(LENGTH),
    enable_dropout=False,
  )
  np.testing.assert_allclose(
    packed.reshape(separate.shape), separate, atol=1e-5
  )


def test_the_future_is_not_seen():
  config = toy_models.TINY_T5
  params = toy_models.t5_params(config, 8)
  inputs, tokens = batch(3, 7, LENGTH)
  logits = np.asarray(teacher_forced(config, params, inputs, tokens))
  changed = tokens.copy()
  changed[:, 5] = (changed[:, 5] + 1) % 50
  other = np.asarray(teacher_forced(config, params, inputs, changed))
  np.testing.assert_array_equal(logits[:, :5], other[:, :5])
  assert (np.abs(logits[:, 5:] - other[:, 5:]).max(-1) > 1e-3).all()


def test_bfloat16_stays_near_float32():
  config = toy_models.TINY_T5
  params = toy_models.t5_params(config, 9)
  inputs, tokens = batch(3, 7, LENGTH)
  exact = np.asarray(teacher_forced(config, params, inputs, tokens))
  narrow = config.replace(dtype='bfloat16')
  model = transformer.language_model(narrow, None, 'fused')
  params = model.prepare(jax.tree.map(lambda x: x.astype('bfloat16'), params))
  cache = start(model, params, inputs, LENGTH)
  assert {x.dtype for x in cache.keys + cache.values} == {jnp.bfloat16.dtype}
  logits = []
  for at in range(0, LENGTH, 4):
    chunk = tokens[:, at : at + 4]
    some, cache = feed(model, params, cache, chunk, np.full(3, at))
    logits.append(some)
  logits = np.concatenate(logits, axis=1)
  assert logits.dtype == np.float32
  # Eight bits of mantissa, about thirty roundings one after another that add
  # up as a random walk: 2**-8 * sqrt(30) is 2 % of the scale.
  error = np.sqrt(np.mean((logits - exact) ** 2))
  assert 1e-4 < error / exact.std() < 0.03


def test_relative_position_buckets():
  # The far half is logarithmic: bucket b starts at the first distance d with
  # log(d / exact) / log(128 / exact) * far >= b, here in whole numbers.
  def bucket(distance, exact, far):
    if distance < exact:
      return distance
    steps = [
      b for b in range(far) if distance**far * exact**b >= exact**far * 128**b
    ]
    return exact + max(steps)

  distance = np.arange(-300, 301)
  causal = layers.relative_position_bucket(distance, bidirectional=False)
  good = [bucket(max(-d, 0), 16, 16) for d in distance.tolist()]
  np.testing.assert_array_equal(causal, good)
  both = layers.relative_position_bucket(distance, bidirectional=True)
  good = [bucket(abs(d), 8, 8) + 16 * (d > 0) for d in distance.tolist()]
  np.testing.assert_array_equal(both, good)
  assert set(causal.tolist()) == set(range(32))
  assert set(both.tolist()) == set(range(32)) - {16}


def test_tied_logits_are_scaled_and_untied_are_not():
  hidden = np.random.default_rng(10).normal(size=(3, 16)).astype(np.float32)
  for config in KINDS.values():
    params = toy_models.t5_params(config, 11)
    model = transformer.language_model(config)
    logits = model.logits(params, jnp.asarray(hidden))
    good = (
      hidden @ params['token_embedder']['embedding'].T / np.sqrt(16)
      if config.logits_via_embedding
      else hidden @ params['decoder']['logits_dense']['kernel']
    )
    np.testing.assert_allclose(logits, good, atol=1e-5)
    assert ('logits_dense' in params['decoder']) != config.logits_via_embedding


def test_one_model_per_configuration():
  config = toy_models.TINY_T5
  one = transformer.language_model(config, 40)
  assert one is transformer.language_model(config.replace(), 40)
  assert one is not transformer.language_model(config, 41)
  assert one.vocab_size == 40
  assert transformer.language_model(config).vocab_size == 50


def test_one_token_decoding_of_t5x_is_refused():
  inputs, tokens = batch(3, 5, 4)
  with pytest.raises(ValueError, match='Use start, extend and logits instead'):
    Transformer(toy_models.TINY_T5).apply(
      {'params': {}}, inputs, tokens, decode=True
    )


def config_of(name):
  """The T5Config of a file in configs/models."""
  text = (CONFIGS / f'{name}.gin').read_text()
  _, sizes = text.split('/transformer.T5Config:\n')
  sizes = re.findall(r'^  (\w+) = (.+)$', sizes, re.MULTILINE)
  assert len(sizes) >= 8
  values = {key: ast.literal_eval(value) for key, value in sizes}
  return transformer.T5Config(**values)


def parameters(config):
  shapes = jax.tree.leaves(toy_models.t5_shapes(config))
  return sum(int(np.prod(x.shape, dtype=np.int64)) for x in shapes)


def parameters_of_deep(config):
  """The same in less time: the count is linear in the number of layers."""
  depth = config.num_encoder_layers
  assert config.num_decoder_layers == depth
  one, two = (
    parameters(config.replace(num_encoder_layers=n, num_decoder_layers=n))
    for n in (1, 2)
  )
  return one + (depth - 1) * (two - one)


@pytest.mark.parametrize(
  'name, millions',
  [
    ('t5_1_1_small', 77),
    ('t5_1_1_base', 248),
    ('t5_1_1_large', 783),
    ('t5_1_1_xl', 2850),
    ('t5_1_1_xxl', 11_135),
    ('t5_1_0_small', 61),
    ('t5_1_0_base', 223),
    ('t5_1_0_large', 738),
    ('t5_1_0_3b', 2852),
    ('t5_1_0_11b', 11_307),
  ],
)
def test_published_parameter_counts(name, millions):
  config = config_of(name)
  count = parameters_of_deep(config)
  assert round(count / 1e6) == millions
  if millions < 100:
    assert count == parameters(config)
  as_draft = CONFIGS / f'{name}_draft.gin'
  if as_draft.exists():
    assert config_of(f'{name}_draft') == config
