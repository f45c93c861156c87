# SPDX-License-Identifier: Apache-2.0
"""Standardization and draws against plain NumPy (section 2.2)."""

import functools

import chi_squared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from scipy import special

from spec_decode import sampling as sampling_lib
from spec_decode.sampling import Sampling

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


@functools.partial(jax.jit, static_argnums=1)
def jitted(logits, sampling):
  return sampling_lib.distribution(logits, sampling)


draw = jax.jit(sampling_lib.draw)


def standardize(logits, **settings):
  return np.asarray(jitted(logits, Sampling(**settings)))


def random_logits(seed, *shape, scale=2.0):
  logits = np.random.default_rng(seed).normal(size=shape) * scale
  return logits.astype(np.float32)


def expected(logits, **settings):
  """The reference, row by row."""
  rows = logits.reshape(-1, logits.shape[-1])
  rows = [reference.standardize(row, **settings) for row in rows]
  return np.stack(rows).reshape(logits.shape)


def rows_with_ties():
  """Logits [2, 5, 12]: random ones, and equal ones in many places."""
  logits = random_logits(0, 2, 5, 12)
  logits[1] = np.random.default_rng(1).integers(0, 3, (5, 12))
  logits[1, 0] = 0.25
  logits[1, 1, 3:7] = logits[1, 1].max() + 1
  return logits


@pytest.mark.parametrize('settings', SETTINGS, ids=str)
def test_distribution_equals_the_reference(settings):
  logits = rows_with_ties()
  p = standardize(logits, **settings)
  assert p.dtype == np.float32
  np.testing.assert_allclose(p, expected(logits, **settings), atol=1e-6)


def test_distribution_without_jit():
  logits, settings = rows_with_ties(), {'temperature': 0.7, 'top_k': 5}
  with jax.disable_jit():
    p = sampling_lib.distribution(jnp.asarray(logits), Sampling(**settings))
  np.testing.assert_allclose(p, expected(logits, **settings), atol=1e-6)


def test_bfloat16_logits_are_used_in_float32():
  settings = {'temperature': 0.7, 'top_k': 6, 'top_p': 0.8}
  logits = jnp.asarray(rows_with_ties(), jnp.bfloat16)
  p = standardize(logits, **settings)
  assert p.dtype == np.float32
  exact = expected(np.asarray(logits, np.float32), **settings)
  np.testing.assert_allclose(p, exact, atol=1e-6)


def test_the_order_of_the_steps_by_hand():
  # At temperature 1 the best id holds 0.6, at 0.5 it holds 0.69.
  logits = np.log([1e-9, 0.6, 0.4])
  for temperature, kept in ((0.5, 1), (1.0, 2)):
    p = reference.standardize(logits, temperature, top_p=0.65)
    assert np.count_nonzero(p) == kept
  # Of the two that top-k leaves, the first holds 0.6 of the mass.
  logits = np.log([1e-9, 0.3, 0.2, 0.2, 0.2, 0.1])
  p = reference.standardize(logits, top_k=2, top_p=0.55)
  np.testing.assert_array_equal(p, [0, 1, 0, 0, 0, 0])
  # Random logits tell the orders apart, so this holds for the code too.
  logits = random_logits(0, 12)
  p = reference.standardize(logits, 1.3, top_p=0.6)
  assert np.count_nonzero(p) > np.count_nonzero(
    reference.standardize(logits, 1.0, top_p=0.6)
  )


@pytest.mark.parametrize('top_k', [1, 2, 3, 5])
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
  p = standardize(logits, top_k=top_k)
  assert (np.count_nonzero(p, axis=-1) == top_k).all()
  np.testing.assert_allclose(p, expected(logits, top_k=top_k), atol=1e-6)


@pytest.mark.parametrize('top_p', [0.1875, 0.5])
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
  p = standardize(logits, top_p=top_p)
  np.testing.assert_allclose(p, expected(logits, top_p=top_p), atol=1e-6)


@pytest.mark.parametrize('top_p', [1e-6, 0.95])
def test_top_p_keeps_the_least_number_that_reaches_it(top_p):
  logits = random_logits(14, 6, 5000)
  p = expected(logits)
  kept = standardize(logits, top_p=top_p) > 0
  mass = np.where(kept, p, 0).sum(-1)
  least = np.where(kept, p, 2).min(-1)
  # Float32 sums are good to about 1e-6.
  assert (mass >= top_p - 1e-5).all()
  assert (mass - least < top_p + 1e-5).all()
  assert (least >= np.where(kept, 0, p).max(-1)).all()


@pytest.mark.parametrize('filters', [{}, {'top_k': 3}, {'top_p': 0.9}])
def test_tiny_temperature_is_argmax(filters):
  logits = random_logits(2, 90, 20, scale=1)
  logits *= np.repeat(np.float32([1, 300, 3e37]), 30)[:, None]
  best = logits[:, 1:].argmax(-1) + 1
  # Ids as close as 2e-4 must still be told apart.
  logits[np.arange(20), best[:20] % 19 + 1] = logits[:20].max(-1) - 2e-4
  logits[:, 0] = 0
  best = logits[:, 1:].argmax(-1) + 1
  top = np.sort(logits[:, 1:])[:, -2:]
  assert (top[:, 1] - top[:, 0] > 1e-4).all()
  uniforms = np.random.default_rng(3).random((90, 2)).astype(np.float32)
  uniforms[::3] = ALMOST_ONE
  with jax.debug_nans(True):
    p = standardize(logits, temperature=1e-6, **filters)
    drawn = draw(p, uniforms)
  np.testing.assert_allclose(p, np.eye(20)[best], atol=1e-30)
  np.testing.assert_array_equal(drawn, best)


@pytest.mark.parametrize('settings', [{}, {'top_k': 3}, {'temperature': 0.0}])
def test_ids_beyond_the_vocabulary_and_forbidden_ones(settings):
  logits = random_logits(4, 3, 10)
  logits[:, [0, 4, 8]] += 20  # what must not come out is the most likely
  p = standardize(logits, vocab_size=8, forbidden=(0, 4, 9, 300), **settings)
  assert p.shape == (3, 8)
  assert (p[:, [0, 4]] == 0).all()
  good = expected(logits[:, :8], forbidden=(0, 4), **settings)
  np.testing.assert_allclose(p, good, atol=1e-6)


@pytest.mark.parametrize('settings', [{}, {'top_k': 9}, {'temperature': 0.0}])
def test_a_vocabulary_wider_than_the_logits(settings):
  logits = random_logits(5, 4, 6) - 50
  p = standardize(logits, vocab_size=11, **settings)
  assert p.shape == (4, 11)
  assert (p[:, 6:] == 0).all()
  good = expected(logits, **(settings | {'top_k': 0}))
  np.testing.assert_allclose(p[:, :6], good, atol=1e-6)


def test_masks_can_be_turned_off():
  logits = random_logits(7, 3, 6)
  p = standardize(logits, forbidden=())
  np.testing.assert_allclose(p, special.softmax(logits, -1), atol=1e-6)


def test_argmax_takes_the_lowest_of_equals():
  rng = np.random.default_rng(9)
  x = rng.integers(0, 3, (40, 7)).astype(np.float32)
  x[0] = 1
  x[1, :-1] = -np.inf
  argmax = jax.jit(sampling_lib.argmax)
  np.testing.assert_array_equal(argmax(x), x.argmax(-1))
  np.testing.assert_array_equal(argmax(x[:, :1]), np.zeros(40))


@pytest.mark.parametrize('vocab', [1, 2, 3, 5, 33])
def test_draws_follow_unnormalised_weights(vocab):
  n = 60_000
  rng = np.random.default_rng(vocab)
  weights = rng.gamma(0.7, size=vocab).astype(np.float32)
  weights[rng.random(vocab) < 0.3] = 0
  weights[vocab // 2] = 0.4
  uniforms = rng.random((3, n, 2)).astype(np.float32)
  scales = np.float32([1, 1e-20, 1e20])[:, None, None]
  drawn = draw(np.broadcast_to(weights * scales, (3, n, vocab)), uniforms)
  law = dict(enumerate(weights / weights.sum(dtype=np.float64)))
  for row in np.asarray(drawn):
    chi_squared.assert_follows(row.tolist(), law)


@pytest.mark.parametrize('vocab', [1000, 33_000])
def test_draws_from_wide_vocabularies(vocab):
  rng = np.random.default_rng(vocab)
  weights = rng.gamma(0.1, size=vocab).astype(np.float32)
  weights[rng.permutation(vocab)[:15]] = weights.sum() / 20  # a peaked law
  weights[rng.random(vocab) < 0.1] = 0
  # Groups of scattered ids keep the expected counts high.
  group = (rng.random(vocab) ** 2 * 64).astype(int)
  law = np.bincount(group, weights.astype(np.float64), minlength=64)
  uniforms = rng.random((20, 400, 2)).astype(np.float32)
  shared = jax.jit(jax.vmap(sampling_lib.draw, (None, 0)))
  drawn = np.concatenate([shared(weights, u) for u in uniforms])
  assert (weights[drawn] > 0).all()
  law = dict(enumerate(law / law.sum()))
  chi_squared.assert_follows(group[drawn].tolist(), law)


@pytest.mark.parametrize('vocab', [1, 2, 3, 33, 4096, 33_000])
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
  edges = np.array([0.0, 1e-38, 0.5, ALMOST_ONE], np.float32)
  for row in weights:
    pairs = np.stack(np.meshgrid(edges, edges), -1).reshape(-1, 2)
    drawn = draw(np.broadcast_to(row, (16, vocab)), pairs)
    assert drawn.dtype == jnp.int32
    assert (row[drawn] > 0).all()


def test_edges_of_the_uniforms_reach_both_ends():
  weights = np.array([[0, 2, 1, 3, 0, 0], [1, 0, 0, 0, 0, 1]], np.float32)
  low = draw(weights, np.zeros((2, 2), np.float32))
  high = draw(weights, np.full((2, 2), ALMOST_ONE))
  np.testing.assert_array_equal(low, [1, 0])
  np.testing.assert_array_equal(high, [3, 5])


def test_rows_are_drawn_on_their_own():
  weights = np.random.default_rng(10).random((5, 3, 37)).astype(np.float32)
  uniforms = np.random.default_rng(11).random((5, 3, 2)).astype(np.float32)
  together = draw(weights, uniforms)
  assert together.shape == (5, 3)
  assert len(np.unique(together)) > 5
  for i in np.ndindex(5, 3):
    assert together[i] == draw(weights[i], uniforms[i])


def test_token_log_probs_are_of_the_plain_softmax():
  logits = random_logits(12, 4, 3, 9, scale=5)
  logits[1] += 1e4  # exp would overflow
  tokens = np.random.default_rng(13).integers(0, 9, (4, 3))
  good = special.log_softmax(logits.astype(np.float64), -1)
  good = np.take_along_axis(good, tokens[..., None], -1)[..., 0]
  log_probs = jax.jit(sampling_lib.token_log_probs)
  found = log_probs(logits, tokens)
  # A float32 near 1e4 is good to 1e-3.
  np.testing.assert_allclose(found[1], good[1], atol=2e-3)
  np.testing.assert_allclose(found[2:], good[2:], atol=1e-5)
  narrow = jnp.asarray(logits, jnp.bfloat16)
  found = log_probs(narrow, tokens)
  assert found.dtype == jnp.float32
  exact = log_probs(narrow.astype(jnp.float32), tokens)
  np.testing.assert_array_equal(found, exact)


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
    ({'vocab_size': -3}, 'vocab_size to be None or an integer >= 0, got -3'),
  ],
)
def test_errors_say_expected_and_got(settings, message):
  with pytest.raises(ValueError, match=message):
    Sampling(**settings)
