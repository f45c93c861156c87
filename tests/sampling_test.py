# SPDX-License-Identifier: Apache-2.0
"""Standardization and draws against plain NumPy (section 2.2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from spec_decode import sampling as sampling_lib
from spec_decode.sampling import Sampling
from tests import chi_squared
from tests import reference

SETTINGS = [
  {},
  {'temperature': 0.7},
  {'temperature': 2.5},
  {'temperature': 0.0},
  {'top_k': 1},
  {'top_k': 4},
  {'top_k': 50},
  {'top_p': 0.35},
  {'top_p': 0.9},
  {'temperature': 0.7, 'top_k': 5},
  {'temperature': 1.3, 'top_p': 0.6},
  {'temperature': 0.7, 'top_k': 6, 'top_p': 0.8},
  {'temperature': 0.0, 'top_k': 3, 'top_p': 0.5},
]
# The largest number below 1 that a uniform float32 can be.
ALMOST_ONE = np.float32(1 - 2**-24)


def random_logits(seed, *shape, scale=2.0):
  logits = np.random.default_rng(seed).normal(size=shape) * scale
  return logits.astype(np.float32)


def expected(logits, **settings):
  """The reference, row by row."""
  rows = logits.reshape(-1, logits.shape[-1])
  rows = [reference.standardize(row, **settings) for row in rows]
  return np.stack(rows).reshape(logits.shape)


@pytest.mark.parametrize('settings', SETTINGS, ids=str)
def test_distribution_equals_the_reference(settings):
  logits = random_logits(0, 3, 4, 12)
  p = jax.jit(sampling_lib.distribution, static_argnums=1)(
    logits, Sampling(**settings)
  )
  assert p.dtype == jnp.float32
  np.testing.assert_allclose(p, expected(logits, **settings), atol=1e-6)


def test_distribution_without_jit():
  logits = random_logits(1, 3, 9)
  logits[1, 3:6] = logits[1].max() + 1  # a tie at the edge
  settings = SETTINGS[-2] | {'top_k': 2}
  with jax.disable_jit():
    p = sampling_lib.distribution(logits, Sampling(**settings))
  np.testing.assert_allclose(p, expected(logits, **settings), atol=1e-6)


def test_temperature_comes_before_top_p():
  # At temperature 1 the best id holds 0.6, at 0.5 it holds 0.69.
  logits = np.log(np.array([[1e-9, 0.6, 0.4]], np.float32))
  p = sampling_lib.distribution(logits, Sampling(0.5, top_p=0.65))
  np.testing.assert_array_equal(p, [[0, 1, 0]])
  p = sampling_lib.distribution(logits, Sampling(1.0, top_p=0.65))
  np.testing.assert_allclose(p, [[0, 0.6, 0.4]], atol=1e-6)


def test_top_k_comes_before_top_p():
  # Of the two that top-k leaves, the first holds 0.6 of the mass.
  logits = np.log(np.array([[1e-9, 0.3, 0.2, 0.2, 0.2, 0.1]], np.float32))
  p = sampling_lib.distribution(logits, Sampling(top_k=2, top_p=0.55))
  np.testing.assert_array_equal(p, [[0, 1, 0, 0, 0, 0]])


@pytest.mark.parametrize('top_k', [1, 2, 3, 4, 5, 6])
def test_top_k_ties_keep_the_lowest_ids(top_k):
  logits = np.array(
    [
      [0, 1, 1, 1, 1, 1, 1],
      [0, 1, 3, 1, 3, 1, 3],
      [0, 2, 2, 5, 2, 2, 5],
      [0, 6, 5, 4, 3, 2, 1],
    ],
    np.float32,
  )
  p = sampling_lib.distribution(logits, Sampling(top_k=top_k))
  assert (np.count_nonzero(p, axis=-1) == top_k).all()
  np.testing.assert_allclose(p, expected(logits, top_k=top_k), atol=1e-6)


@pytest.mark.parametrize('top_p', [0.0625, 0.125, 0.1875, 0.5, 0.75, 1.0])
def test_top_p_ties_keep_the_lowest_ids(top_p):
  # Powers of two, so that masses and edges are exact.
  weights = np.array(
    [
      [1, 2, 2, 2, 2, 2, 2, 2, 2],
      [9, 1, 4, 1, 4, 1, 1, 1, 3],
      [5, 1, 1, 2, 2, 2, 4, 2, 2],
    ],
    np.float32,
  )
  logits = np.log(weights)
  p = sampling_lib.distribution(logits, Sampling(top_p=top_p))
  np.testing.assert_allclose(p, expected(logits, top_p=top_p), atol=1e-6)


@pytest.mark.parametrize('vocab', [2, 7, 100, 5000])
def test_top_p_keeps_the_least_number_that_reaches_it(vocab):
  logits = random_logits(vocab, 6, vocab)
  p = np.asarray(sampling_lib.distribution(logits, Sampling()), np.float64)
  for top_p in (1e-6, 0.2, 0.5, 0.95, 0.999):
    kept = sampling_lib.distribution(logits, Sampling(top_p=top_p)) > 0
    kept = np.asarray(kept)
    mass = np.where(kept, p, 0).sum(-1)
    least = np.where(kept, p, 2).min(-1)
    assert (mass >= top_p - 1e-5).all()
    assert (mass - least < top_p + 1e-5).all()
    assert (least >= np.where(kept, 0, p).max(-1)).all()


@pytest.mark.parametrize('filters', [{}, {'top_k': 3}, {'top_p': 0.9}])
@pytest.mark.parametrize('scale', [1, 300, 3e37])
def test_tiny_temperature_is_argmax(filters, scale):
  logits = random_logits(2, 50, 20, scale=1) * np.float32(scale)
  top = np.sort(logits[:, 1:])[:, -2:]
  logits = logits[top[:, 1] - top[:, 0] > 1e-4]
  assert len(logits) > 40
  uniforms = np.random.default_rng(3).random((len(logits), 2))
  with jax.debug_nans(True), jax.debug_infs(False):
    cold = Sampling(1e-6, **filters)
    weights = jnp.exp(sampling_lib.log_weights(logits, cold))
    p = sampling_lib.distribution(logits, cold)
    drawn = sampling_lib.draw(weights, uniforms.astype(np.float32))
  one_hot = sampling_lib.distribution(logits, Sampling(0.0))
  np.testing.assert_allclose(p, one_hot, atol=1e-30)
  np.testing.assert_array_equal(drawn, logits[:, 1:].argmax(-1) + 1)


def test_ids_beyond_the_vocabulary_and_forbidden_ones():
  logits = random_logits(4, 3, 10)
  logits[:, [0, 4, 8]] += 20  # what must not come out is the most likely
  for settings in ({}, {'top_k': 3}, {'top_p': 0.7}, {'temperature': 0.0}):
    narrow = Sampling(vocab_size=8, forbidden=(0, 4), **settings)
    p = sampling_lib.distribution(logits, narrow)
    assert p.shape == (3, 8)
    good = expected(logits[:, :8], forbidden=(0, 4), **settings)
    np.testing.assert_allclose(p, good, atol=1e-6)
    assert (np.asarray(p)[:, [0, 4]] == 0).all()


def test_a_vocabulary_wider_than_the_logits():
  logits = random_logits(5, 4, 6) - 50
  for settings in ({}, {'top_k': 9}, {'top_p': 0.99}, {'temperature': 0.0}):
    wide = Sampling(vocab_size=11, **settings)
    p = np.asarray(sampling_lib.distribution(logits, wide))
    assert p.shape == (4, 11)
    assert (p[:, 6:] == 0).all()
    np.testing.assert_allclose(p[:, :6], expected(logits, **settings), atol=1e-6)


def test_forbidden_ids_outside_the_vocabulary_change_nothing():
  logits = random_logits(6, 3, 6)
  p = sampling_lib.distribution(logits, Sampling(forbidden=(0, 6, 300)))
  np.testing.assert_allclose(p, expected(logits), atol=1e-6)


def test_masks_can_be_turned_off():
  logits = random_logits(7, 3, 6)
  p = sampling_lib.distribution(logits, Sampling(forbidden=()))
  np.testing.assert_allclose(p, special.softmax(logits, -1), atol=1e-6)


def test_bfloat16_logits_are_used_in_float32():
  logits = jnp.asarray(random_logits(8, 5, 40), jnp.bfloat16)
  for settings in SETTINGS:
    p = sampling_lib.distribution(logits, Sampling(**settings))
    assert p.dtype == jnp.float32
    exact = expected(np.asarray(logits, np.float32), **settings)
    np.testing.assert_allclose(p, exact, atol=1e-6)


def test_argmax_takes_the_lowest_of_equals():
  rng = np.random.default_rng(9)
  x = rng.integers(0, 3, (40, 7)).astype(np.float32)
  x[0] = 1
  x[1, :-1] = -np.inf
  np.testing.assert_array_equal(sampling_lib.argmax(x), x.argmax(-1))
  np.testing.assert_array_equal(sampling_lib.argmax(x[:, :1]), np.zeros(40))


@pytest.mark.parametrize('vocab', [1, 2, 3, 5, 16, 31, 32, 33])
def test_draws_follow_unnormalised_weights(vocab):
  n = 60_000
  rng = np.random.default_rng(vocab)
  weights = rng.gamma(0.7, size=vocab).astype(np.float32)
  weights[rng.random(vocab) < 0.3] = 0
  weights[vocab // 2] = 0.4
  keys = jax.random.uniform(jax.random.key(vocab), (3, n, 2))
  for scale, uniforms in zip((1, 1e-20, 1e20), keys):
    scaled = jnp.broadcast_to(weights * np.float32(scale), (n, vocab))
    drawn = np.asarray(jax.jit(sampling_lib.draw)(scaled, uniforms))
    law = enumerate(weights.astype(np.float64) / weights.sum(dtype=np.float64))
    chi_squared.assert_follows(drawn.tolist(), dict(law))


@pytest.mark.parametrize('vocab', [1000, 32_128, 33_000])
def test_draws_from_wide_vocabularies(vocab):
  rng = np.random.default_rng(vocab)
  weights = rng.gamma(0.1, size=vocab).astype(np.float32)
  weights[rng.permutation(vocab)[:15]] = weights.sum() / 20  # a peaked law
  weights[rng.random(vocab) < 0.1] = 0
  # 64 uneven groups of scattered ids keep the expected counts high.
  group = (rng.random(vocab) ** 2 * 64).astype(int)
  law = np.bincount(group, weights.astype(np.float64), minlength=64)
  law /= law.sum()
  draw = jax.jit(jax.vmap(sampling_lib.draw, (None, 0)))
  drawn = [
    draw(weights, jax.random.uniform(jax.random.key(i), (500, 2)))
    for i in range(20)
  ]
  drawn = np.concatenate(drawn)
  assert (weights[drawn] > 0).all()
  chi_squared.assert_follows(group[drawn].tolist(), dict(enumerate(law)))


@pytest.mark.parametrize('vocab', [1, 2, 3, 7, 33, 1000, 4096, 33_000])
def test_no_draw_has_weight_zero(vocab):
  rng = np.random.default_rng(vocab)
  weights = rng.gamma(1.0, size=(8, vocab)).astype(np.float32)
  weights *= rng.random(weights.shape) < 0.3
  # Whole ends, and all but one, without weight.
  weights[0, : vocab // 2] = 0
  weights[1, (vocab + 1) // 2 :] = 0
  weights[2] = 0
  weights[3] *= 1e-30
  weights[:3, vocab // 2] = 0.3
  weights[3:, rng.integers(vocab)] = 1.0
  edges = [0.0, 1e-38, 0.5, ALMOST_ONE]
  pairs = np.array([(a, b) for a in edges for b in edges], np.float32)
  drawn = jax.vmap(
    lambda row: jax.vmap(lambda pair: sampling_lib.draw(row, pair))(pairs)
  )(weights)
  assert drawn.dtype == jnp.int32
  assert (np.take_along_axis(weights, np.asarray(drawn), axis=1) > 0).all()


def test_edges_of_the_uniforms_reach_both_ends():
  weights = np.array([[0, 2, 1, 3, 0, 0], [1, 0, 0, 0, 0, 1]], np.float32)
  low = sampling_lib.draw(weights, np.zeros((2, 2), np.float32))
  high = sampling_lib.draw(weights, np.full((2, 2), ALMOST_ONE))
  np.testing.assert_array_equal(low, [1, 0])
  np.testing.assert_array_equal(high, [3, 5])


def test_rows_are_drawn_on_their_own():
  weights = np.random.default_rng(10).random((5, 3, 37)).astype(np.float32)
  uniforms = np.random.default_rng(11).random((5, 3, 2)).astype(np.float32)
  together = sampling_lib.draw(weights, uniforms)
  assert together.shape == (5, 3)
  assert len(np.unique(together)) > 5
  for i in np.ndindex(5, 3):
    assert together[i] == sampling_lib.draw(weights[i], uniforms[i])


def test_token_log_probs_are_of_the_plain_softmax():
  logits = random_logits(12, 4, 3, 9, scale=5)
  logits[1] += 1e4  # exp would overflow
  tokens = np.random.default_rng(13).integers(0, 9, (4, 3))
  good = special.log_softmax(logits.astype(np.float64), -1)
  good = np.take_along_axis(good, tokens[..., None], -1)[..., 0]
  found = sampling_lib.token_log_probs(logits, tokens)
  # A float32 near 1e4 is good to 1e-3.
  np.testing.assert_allclose(found[1], good[1], atol=2e-3)
  others = np.array([0, 2, 3])
  np.testing.assert_allclose(found[others], good[others], atol=1e-5)
  narrow = jnp.asarray(logits[0], jnp.bfloat16)
  found = sampling_lib.token_log_probs(narrow, tokens[0])
  assert found.dtype == jnp.float32


def test_greedy_and_filtered():
  assert Sampling(0).greedy and not Sampling(1e-6).greedy
  assert Sampling(top_k=1).filtered and Sampling(top_p=0.5).filtered
  assert not Sampling(0.7).filtered
  assert len({Sampling(), Sampling(1.0), Sampling(0.5)}) == 2


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'temperature': -0.1}, r'temperature to be a number >= 0, got -0\.1'),
    ({'temperature': float('nan')}, 'temperature .* got nan'),
    ({'top_k': -1}, r'top_k to be an integer >= 0 \(0 for all ids\), got -1'),
    ({'top_p': 0.0}, r'top_p to be a number in \(0, 1\] .* got 0\.0'),
    ({'top_p': 1.5}, r'top_p .* got 1\.5'),
    ({'vocab_size': -3}, 'vocab_size to be an integer >= 0, got -3'),
  ],
)
def test_errors_say_expected_and_got(settings, message):
  with pytest.raises(ValueError, match=message):
    Sampling(**settings)
