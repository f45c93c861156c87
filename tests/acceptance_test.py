# SPDX-License-Identifier: Apache-2.0
"""`verify` against Algorithm 1 in NumPy, and lenience (appendix A.5)."""

import chi_squared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from spec_decode import acceptance
from spec_decode import sampling as sampling_lib
from spec_decode import theory
from spec_decode.sampling import Sampling

GAMMA, VOCAB = 4, 6
PLAIN = Sampling(forbidden=())
GREEDY = Sampling(0.0, forbidden=())
# Rows per call, so that most tests share their compiled programs.
CHUNK = 20_000
_verify = jax.jit(acceptance.verify, static_argnums=(6, 7))
draw = jax.jit(sampling_lib.draw)
_beta = jax.jit(acceptance.acceptance_probability, static_argnums=(3, 4))


def verify(p, guesses, count, q, tests, extras, sampling, lenience=1.0):
  """`acceptance.verify` on logits log p, any number of rows."""
  with np.errstate(divide='ignore'):
    logits = np.log(np.asarray(p, np.float32))
  count = np.asarray(count, np.int32)
  arrays = logits, np.asarray(guesses, np.int32), count, q, tests, extras
  rows = len(count)
  pad = lambda x: np.concatenate([x, np.repeat(x[-1:], -rows % CHUNK, 0)])
  arrays = [x if x is None else pad(x) for x in arrays]
  parts = []
  for i in range(0, rows, CHUNK):
    part = [x if x is None else x[i : i + CHUNK] for x in arrays]
    parts.append(_verify(*part, sampling, lenience))
  accepted, extra = (np.concatenate(x)[:rows] for x in zip(*parts))
  return accepted, extra


def beta_of(p, guesses, q, sampling, lenience=1.0):
  with np.errstate(divide='ignore'):
    return np.asarray(_beta(np.log(p), guesses, q, sampling, lenience))


def blocks(seed, rows, gamma=GAMMA, agreement=0.6):
  """p [B, G + 1, V], q [B, G, V], guesses drawn from q and uniforms."""
  rng = np.random.default_rng(seed)
  random_laws = lambda n: rng.dirichlet(np.full(VOCAB, 0.8), (rows, n))
  p = random_laws(gamma + 1)
  p[rng.random(p.shape) < 0.15] = 0
  p[..., 0] += 0.01
  q = agreement * p[:, :-1] + (1 - agreement) * random_laws(gamma)
  q[rng.random(q.shape) < 0.15] = 0
  q[..., 0] += 0.01
  p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
  edges = np.cumsum(q, -1)
  edges /= edges[..., -1:]
  guesses = (rng.random((rows, gamma, 1)) >= edges).sum(-1)
  uniforms = rng.random((rows, gamma))
  return (
    p.astype(np.float32),
    q.astype(np.float32),
    guesses.astype(np.int32),
    uniforms.astype(np.float32),
  )


def pairs(seed, rows):
  return np.random.default_rng(seed).random((rows, 2)).astype(np.float32)


def at_guesses(x, guesses):
  return np.take_along_axis(x, guesses[..., None], -1)[..., 0]


def law_of(weights):
  weights = np.asarray(weights, np.float64)
  return dict(enumerate(weights / weights.sum()))


@pytest.mark.parametrize('lenience', [1.0, 0.4])
def test_accepted_equals_algorithm_1(lenience):
  rows = 3000
  p, q, guesses, uniforms = blocks(0, rows)
  count = np.random.default_rng(0).integers(0, GAMMA + 1, rows)
  count[::2] = GAMMA
  accepted, extra = verify(
    p, guesses, count, q, uniforms, pairs(1, rows), PLAIN, lenience
  )
  # Rounding may decide where r q is within 1e-6 of p.
  p_guess, q_guess = at_guesses(p[:, :-1], guesses), at_guesses(q, guesses)
  margin = np.abs(uniforms * lenience * q_guess - p_guess)
  clear = ((margin > 1e-6) | (p_guess == 0)).all(-1)
  assert clear.mean() > 0.99
  good = [
    reference.algorithm_1(p[b], q[b, :c], guesses[b, :c], uniforms[b], lenience)
    for b, c in enumerate(count)
  ]
  good_accepted = np.array([n for n, _ in good])
  np.testing.assert_array_equal(accepted[clear], good_accepted[clear])
  for c in range(GAMMA + 1):  # none, some and all were accepted
    assert set(good_accepted[count == c].tolist()) == set(range(c + 1))
  laws = np.stack([law for _, law in good])
  assert (laws[clear, extra[clear]] > 0).all()


@pytest.mark.parametrize('one_hot', [False, True])
@pytest.mark.parametrize('lenience', [1.0, 0.4])
def test_the_extra_token_follows_its_law(lenience, one_hot):
  p, q, guesses, uniforms = blocks(3, 400)
  if one_hot:
    q = np.eye(VOCAB, dtype=np.float32)[guesses]
  good = [
    reference.algorithm_1(*row, lenience)
    for row in zip(p, q, guesses, uniforms)
  ]
  n = np.array([n for n, _ in good])
  # Two rows for each possible number of accepted guesses.
  rows = [b for i in range(GAMMA + 1) for b in np.flatnonzero(n == i)[:2]]
  assert len(rows) == 2 * (GAMMA + 1)
  repeat = lambda x: np.repeat(x[rows], CHUNK, axis=0)
  accepted, extra = verify(
    repeat(p),
    repeat(guesses),
    repeat(np.full(400, GAMMA)),
    None if one_hot else repeat(q),
    repeat(uniforms),
    pairs(4, len(rows) * CHUNK),
    PLAIN,
    lenience,
  )
  np.testing.assert_array_equal(accepted, repeat(n))
  for row, drawn in zip(rows, extra.reshape(-1, CHUNK)):
    chi_squared.assert_follows(drawn.tolist(), law_of(good[row][1]))


def test_fewer_drawn_guesses_leave_the_target_s_own_law():
  # All drawn guesses stand: what follows comes from p, not from p - q.
  p, q, guesses, _ = blocks(5, 3)
  p[:, :-1] = 0.01
  np.put_along_axis(p[:, :-1], guesses[..., None], 1.0, axis=-1)
  p[:, 2] = [0.1, 0.2, 0.0, 0.3, 0.2, 0.2]
  q[:, 2] = [0.0, 0.0, 0.1, 0.0, 0.9, 0.0]
  repeat = lambda x: np.repeat(x, CHUNK, axis=0)
  count = np.array([2, 0, 2])
  accepted, extra = verify(
    repeat(p),
    repeat(guesses),
    repeat(count),
    repeat(q),
    np.full((3 * CHUNK, GAMMA), 0.5, np.float32),
    pairs(6, 3 * CHUNK),
    PLAIN,
  )
  np.testing.assert_array_equal(accepted, repeat(count))
  for row, drawn in enumerate(extra.reshape(3, CHUNK)):
    chi_squared.assert_follows(drawn.tolist(), law_of(p[row, count[row]]))


@pytest.mark.parametrize('sampling', [PLAIN, GREEDY], ids=['plain', 'greedy'])
def test_guesses_that_were_not_drawn_do_not_matter(sampling):
  rows = 300
  p, q, guesses, uniforms = blocks(7, rows)
  count = np.arange(rows) % (GAMMA + 1)
  junk = np.arange(GAMMA) >= count[:, None]
  args = uniforms, pairs(8, rows), sampling
  clean = verify(p, guesses, count, q, *args)
  for token, mass in ((-1, 0.0), (0, 5.0), (77, np.nan)):
    guesses = np.where(junk, token, guesses)
    q = np.where(junk[..., None], np.float32(mass), q)
    dirty = verify(p, guesses, count, q, *args)
    np.testing.assert_array_equal(clean, dirty)
  assert (clean[0] <= count).all() and (clean[0] == count).any()


def test_only_the_leading_run_counts():
  p = np.full((4, GAMMA + 1, VOCAB), 0.25, np.float32)
  p[..., 4:] = 0
  q = np.full((4, GAMMA, VOCAB), 0.5, np.float32)
  tests = np.float32([[0.1, 0.9, 0.1, 0.1]] * 4)  # passes 1, 0, 1, 1
  guesses = np.zeros((4, GAMMA))
  for sampling in (PLAIN, GREEDY):
    if sampling.greedy:
      p[:, 1, 1] = 0.3  # again 1, 0, 1, 1
    accepted, _ = verify(
      p, guesses, [4, 2, 1, 0], q, tests, pairs(9, 4), sampling
    )
    np.testing.assert_array_equal(accepted, [1, 1, 1, 0])


def test_an_impossible_guess_fails_even_at_zero():
  # Ids 3 and 4 are cut by top-k, 5 by the vocabulary, 0 is padding.
  p = np.exp(np.array([9.0, 2, 1, 0, -1, 9], np.float32))
  sampling = Sampling(top_k=2, vocab_size=5)
  ids = np.array([0, 3, 4, 1, 2])
  q = np.full((5, GAMMA, 5), 0.2, np.float32)
  for some_q in (q, None):
    accepted, extra = verify(
      np.broadcast_to(p, (5, GAMMA + 1, VOCAB)),
      np.repeat(ids[:, None], GAMMA, axis=1),
      np.full(5, GAMMA),
      some_q,
      np.zeros((5, GAMMA), np.float32),
      np.zeros((5, 2), np.float32),
      sampling,
    )
    np.testing.assert_array_equal(accepted, [0, 0, 0, GAMMA, GAMMA])
    assert set(extra.tolist()) <= {1, 2}


def test_equal_laws_fall_back_to_the_target_s_when_rejected():
  p = np.full((CHUNK, GAMMA + 1, VOCAB), 0.25, np.float32)
  p[..., :2] = 0  # what is left is exact in float32
  rejecting = np.ones((CHUNK, GAMMA), np.float32)  # beyond any uniform number
  accepted, extra = verify(
    p,
    np.full((CHUNK, GAMMA), 3),
    np.full(CHUNK, GAMMA),
    p[:, :-1],
    rejecting,
    pairs(10, CHUNK),
    PLAIN,
  )
  assert (accepted == 0).all()
  chi_squared.assert_follows(extra.tolist(), law_of(p[0, 0]))


def test_one_hot_laws_on_the_same_id_give_no_padding():
  rows = 30
  p, _, _, _ = blocks(11, rows)
  best = p[:, :, 1:].argmax(-1) + 1
  assert len(set(best[:, 0].tolist())) > 2
  q = np.eye(VOCAB, dtype=np.float32)[best[:, :-1]]
  rejecting = np.ones((rows, GAMMA), np.float32)
  for some_q in (q, None):
    with jax.debug_nans(True):
      accepted, extra = verify(
        p + 1e-9,
        best[:, :-1],
        np.full(rows, GAMMA),
        some_q,
        rejecting,
        pairs(12, rows),
        Sampling(1e-4),
      )
    np.testing.assert_array_equal(accepted, 0)
    np.testing.assert_array_equal(extra, best[:, 0])


def test_equal_laws_accept_uniforms_next_to_one():
  rows = 500
  p, _, guesses, _ = blocks(13, rows)
  guesses = np.where(at_guesses(p[:, :-1], guesses) > 0, guesses, 0)
  # p is recomputed from logits, which float32 keeps to about 5e-7.
  uniforms = np.full((rows, GAMMA), 1 - 1e-6, np.float32)
  accepted, _ = verify(
    p,
    guesses,
    np.full(rows, GAMMA),
    p[:, :-1],
    uniforms,
    pairs(14, rows),
    PLAIN,
  )
  np.testing.assert_array_equal(accepted, GAMMA)


@pytest.mark.parametrize('lenience', [1.0, 0.4])
@pytest.mark.parametrize('sampling', [PLAIN, GREEDY], ids=['plain', 'greedy'])
def test_no_q_is_a_one_hot_q(sampling, lenience):
  rows = 1000
  p, _, guesses, uniforms = blocks(15, rows)
  one_hot = np.eye(VOCAB, dtype=np.float32)[guesses]
  count = np.arange(rows) % 5
  rest = uniforms, pairs(16, rows), sampling, lenience
  dense = verify(p, guesses, count, one_hot, *rest)
  none = verify(p, guesses, count, None, *rest)
  np.testing.assert_array_equal(dense, none)
  assert set(none[0].tolist()) == set(range(5))
  betas = [
    beta_of(p[:, :-1], guesses, q, sampling, lenience) for q in (one_hot, None)
  ]
  np.testing.assert_allclose(*betas, atol=1e-6)


def test_argmax_compares_ids_not_ratios():
  # q is smaller than p at the guess, yet argmax must reject it.
  p = np.zeros((3, GAMMA + 1, VOCAB), np.float32)
  p[:, 0, :3], p[:, 1, :3] = [0.3, 0.5, 0.2], [0.2, 0.1, 0.7]
  q = np.full((3, GAMMA, VOCAB), 0.2, np.float32)
  guesses = np.arange(3)[:, None] + np.zeros((1, GAMMA))
  tests, extras = np.zeros((3, GAMMA), np.float32), pairs(17, 3)
  for some in ((tests, extras), (None, None)):
    accepted, extra = verify(p, guesses, np.ones(3), q, *some, GREEDY)
    np.testing.assert_array_equal(accepted, [0, 1, 0])
    np.testing.assert_array_equal(extra, [1, 2, 1])


def test_top_k_of_one_is_argmax():
  rows = 500
  p, _, guesses, uniforms = blocks(18, rows)
  args = p, guesses, np.arange(rows) % 5, None, uniforms, pairs(19, rows)
  sampled = verify(*args, Sampling(top_k=1, forbidden=()))
  greedy = verify(*args, GREEDY)
  np.testing.assert_array_equal(sampled, greedy)
  assert len(set(greedy[0].tolist())) == 5


@pytest.mark.parametrize('lenience', [0.7, 0.1, 1e-3])
def test_lenient_argmax_accepts_what_is_close_to_the_best(lenience):
  rows = 2000
  p, _, guesses, uniforms = blocks(20, rows)
  args = guesses, np.full(rows, GAMMA), None, uniforms, pairs(21, rows)
  accepted, extra = verify(p * 1000, *args, GREEDY, lenience)
  ratio = at_guesses(p[:, :-1], guesses) / p[:, :-1].max(-1)
  clear = (np.abs(ratio - lenience) > 1e-5).all(-1)
  assert clear.mean() > 0.98
  good = np.cumprod(ratio >= lenience, axis=1).sum(1)
  np.testing.assert_array_equal(accepted[clear], good[clear])
  np.testing.assert_array_equal(extra, p.argmax(-1)[np.arange(rows), accepted])
  plain, _ = verify(p, *args, GREEDY)
  assert (accepted >= plain).all() and (accepted > plain).any()


def test_lenient_argmax_never_accepts_ids_that_may_not_occur():
  p = np.ones((3, GAMMA + 1, VOCAB), np.float32)
  p[..., [0, 3, 5]] = 50
  guesses = np.array([0, 5, 3])[:, None] + np.zeros((1, GAMMA))
  accepted, extra = verify(
    p,
    guesses,
    np.full(3, GAMMA),
    None,
    None,
    None,
    Sampling(0.0, vocab_size=5),
    0.1,
  )
  np.testing.assert_array_equal(accepted, [0, 0, GAMMA])
  np.testing.assert_array_equal(extra, 3)


def test_lenient_sampling_stays_below_p_over_l():
  rows, lenience = 200_000, 0.4
  p, q, _, _ = blocks(22, 3, agreement=0.2)
  for target, draft in zip(p, q):
    rng = np.random.default_rng(23)
    exact_q = draft[0].astype(np.float64) / draft[0].sum(dtype=np.float64)
    guesses = np.zeros((rows, GAMMA), np.int32)
    guesses[:, 0] = rng.choice(VOCAB, rows, p=exact_q)
    repeat = lambda x: np.broadcast_to(x, (rows, *x.shape))
    accepted, extra = verify(
      repeat(target),
      guesses,
      np.ones(rows),
      repeat(draft),
      rng.random((rows, GAMMA)).astype(np.float32),
      pairs(24, rows),
      PLAIN,
      lenience,
    )
    token = np.where(accepted > 0, guesses[:, 0], extra)
    found = np.bincount(token, minlength=VOCAB) / rows
    error = 4 * np.sqrt(found * (1 - found) / rows)
    assert (found <= target[0] / lenience + error).all()
    # It is lenient indeed: somewhere the target's own law is exceeded.
    assert (found > target[0] + error).any()
    beta = theory.beta(target[0], exact_q, lenience)
    error = 4 * np.sqrt(beta * (1 - beta) / rows)
    assert abs(accepted.mean() - beta) < error + 1e-6


@pytest.mark.parametrize('lenience', [1.0, 0.5, 0.1])
def test_beta_is_the_sum_of_the_smaller_masses(lenience):
  p, q, guesses, _ = blocks(25, 50)
  beta = beta_of(p[:, :-1], guesses, q, PLAIN, lenience)
  good = np.minimum(p[:, :-1].astype(float) / lenience, q).sum(-1)
  np.testing.assert_allclose(beta, good, atol=1e-6)
  assert beta.shape == guesses.shape and np.ptp(beta) > 0.2


@pytest.mark.parametrize('lenience', [1.0, 0.4])
@pytest.mark.parametrize(
  'sampling',
  [PLAIN, GREEDY, Sampling(0.7, 3)],
  ids=['plain', 'greedy', 'filtered'],
)
def test_beta_is_how_often_the_guess_is_accepted(sampling, lenience):
  rows = 2 * CHUNK
  p, q, _, _ = blocks(26, 4)
  repeat = lambda x: np.repeat(x, rows, axis=0)
  rng = np.random.default_rng(27)
  guesses = np.zeros((4 * rows, GAMMA), np.int32)
  exact = q[:, 0].astype(np.float64)
  exact /= exact.sum(-1, keepdims=True)
  guesses[:, 0] = np.concatenate([rng.choice(VOCAB, rows, p=x) for x in exact])
  accepted, _ = verify(
    repeat(p),
    guesses,
    np.ones(4 * rows),
    repeat(q),
    rng.random((4 * rows, GAMMA)).astype(np.float32),
    pairs(28, 4 * rows),
    sampling,
    lenience,
  )
  rate = accepted.reshape(4, rows).mean(1)
  zeros = np.zeros((4, GAMMA), np.int32)
  beta = beta_of(p[:, :-1], zeros, q, sampling, lenience)[:, 0]
  beta = np.clip(beta.astype(np.float64), 0, 1)
  error = np.sqrt(beta * (1 - beta) / rows)
  assert (np.abs(rate - beta) <= 4 * error + 1e-6).all()
  assert np.ptp(beta) > 0.05


def test_no_guesses():
  p, _, _, _ = blocks(31, 3)
  p = np.repeat(p[:, :1], CHUNK, axis=0)
  rows = len(p)
  empty = np.zeros((rows, 0), np.float32)
  accepted, extra = verify(
    p, empty, np.zeros(rows), None, empty, pairs(32, rows), PLAIN
  )
  assert (accepted == 0).all()
  for row, drawn in enumerate(extra.reshape(3, CHUNK)):
    chi_squared.assert_follows(drawn.tolist(), law_of(p[row * CHUNK, 0]))


def test_no_guesses_draw_what_plain_decoding_draws():
  rng = np.random.default_rng(33)
  logits = 3 * rng.normal(size=(CHUNK, 1, 64)).astype(np.float32)
  weights = jnp.exp(sampling_lib.log_weights(jnp.asarray(logits[:, 0]), PLAIN))
  # Uniforms on the very edges between two ids, where rounding decides.
  sums = np.cumsum(weights[:, :8], axis=1)
  at = rng.integers(0, 7, (CHUNK, 1))
  inner = np.take_along_axis(sums, at, 1)[:, 0] / sums[:, -1]
  extras = np.stack([np.zeros(CHUNK), inner], axis=1).astype(np.float32)
  empty = np.zeros((CHUNK, 0), np.float32)
  _, extra = _verify(
    logits, empty.astype(np.int32), np.zeros(CHUNK), None, empty, extras, PLAIN
  )
  np.testing.assert_array_equal(extra, draw(weights, extras))
  # Normalised weights, the same law, do not give the same ids here.
  p = weights / weights.sum(-1, keepdims=True)
  assert (draw(p, extras) != extra).any()
