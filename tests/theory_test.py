# SPDX-License-Identifier: Apache-2.0
"""Section 3 against the paper's tables, simulation and exact arithmetic."""

import csv
import fractions
import pathlib

import numpy as np
import pytest

from spec_decode import theory

PAPER = pathlib.Path(__file__).parents[1] / 'experiments' / 'paper'
CASES = [(0.0, 3), (0.35, 1), (0.6, 2), (0.8, 5), (0.9, 10), (0.97, 0)]


def published(table):
  """The columns of one published table, as arrays."""
  with open(PAPER / f'{table}.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert rows
  return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def random_pairs(count, vocab, seed):
  """Random p and q, [count, vocab] each, some tokens missing from each."""
  rng = np.random.default_rng(seed)
  pair = rng.dirichlet(np.full(vocab, 0.7), size=(2, count))
  pair *= rng.random(pair.shape) < 0.8
  pair[..., 0] += 0.01
  return pair / pair.sum(axis=-1, keepdims=True)


def accepted_guesses(alpha, gamma, shape, rng):
  """The leading run of accepted guesses, test by test."""
  tests = rng.random((*shape, gamma)) < alpha
  return np.cumprod(tests, axis=-1).sum(axis=-1)


def assert_mean(samples, expected):
  """The mean lies within 4 standard errors of what was expected."""
  error = samples.std() / np.sqrt(samples.size)
  assert abs(samples.mean() - expected) <= 4 * error + 1e-12


def test_table_1_to_the_printed_digits():
  table = published('table1_operations')
  alpha, gamma = table['alpha'].astype(float), table['gamma'].astype(int)
  speed = theory.speedup(alpha, gamma, 0)
  operations = theory.operations(alpha, gamma, 0)
  assert [f'{x:.2f}' for x in speed] == list(table['speed'])
  assert [f'{x:.2f}' for x in operations] == list(table['operations'])


def test_table_4_expected_column():
  table = published('table4_expected_vs_measured')
  alpha, gamma = table['alpha'].astype(float), table['gamma'].astype(int)
  speed = theory.speedup(alpha, gamma, table['c'].astype(float))
  # The paper used alpha before it was rounded to two digits.
  np.testing.assert_allclose(speed, table['expected'].astype(float), atol=0.07)


def test_bigram_draft_on_translation():
  assert f'{theory.speedup(0.2, 3, 0):.2f}' == '1.25'


def test_twenty_token_outputs_fall_short_of_the_formula():
  assert f'{theory.tokens_per_call(0.7, 7):.2f}' == '3.14'
  assert theory.tokens_with_cutoff(0.7, 7, 20) == pytest.approx(2.87, abs=0.01)


@pytest.mark.parametrize('alpha, gamma', CASES)
def test_simulated_iterations(alpha, gamma):
  c, c_hat = 0.15, 0.08
  rng = np.random.default_rng(1)
  tokens = accepted_guesses(alpha, gamma, (50_000,), rng) + 1
  assert_mean(tokens, theory.tokens_per_call(alpha, gamma))
  # One iteration runs the draft gamma times, the target once over gamma + 1.
  seconds = gamma * c + 1
  assert_mean(tokens / seconds, theory.speedup(alpha, gamma, c))
  spent = gamma * c_hat + gamma + 1
  error = tokens.std() / np.sqrt(tokens.size) * spent / tokens.mean() ** 2
  found = spent / tokens.mean()
  assert abs(found - theory.operations(alpha, gamma, c_hat)) <= (
    4 * error + 1e-12
  )


@pytest.mark.parametrize('alpha', [0.0, 1e-30, 0.3, 0.999, 1 - 1e-12, 1.0])
@pytest.mark.parametrize('gamma', [0, 1, 7, 200])
def test_tokens_per_call_keeps_its_digits(alpha, gamma):
  powers = [fractions.Fraction(alpha) ** i for i in range(gamma + 1)]
  exact = float(sum(powers))
  assert theory.tokens_per_call(alpha, gamma) == pytest.approx(exact, rel=1e-13)


def test_next_to_one_is_as_good_as_one():
  for alpha in (np.nextafter(1, 0), 1 - 1e-12, 1.0):
    assert theory.tokens_per_call(alpha, 5) == pytest.approx(6, rel=1e-11)
    assert theory.speedup(alpha, 5, 0.2) == pytest.approx(3, rel=1e-11)
    assert theory.operations(alpha, 5, 0.3) == pytest.approx(1.25, rel=1e-11)
    assert theory.tokens_with_cutoff(alpha, 5, 18) == pytest.approx(6, rel=1e-9)
    assert theory.speedup_bound(alpha, 0.25) == pytest.approx(1.6, rel=1e-11)


def test_no_guesses_is_standard_decoding():
  alpha = np.linspace(0, 1, 5)
  assert np.all(theory.tokens_per_call(alpha, 0) == 1)
  assert np.all(theory.speedup(alpha, 0, 0.4) == 1)
  assert np.all(theory.operations(alpha, 0, 0.4) == 1)
  assert theory.tokens_with_cutoff(alpha, 0, 9) == pytest.approx(1)


def test_oracle_is_the_limit_of_many_guesses():
  rng = np.random.default_rng(2)
  # Guesses drawn up to the first rejection, which is itself one new token.
  assert_mean(rng.geometric(0.2, 50_000), theory.oracle_tokens_per_call(0.8))
  alpha = np.array([0.0, 0.5, 0.9])
  many = theory.tokens_per_call(alpha, 2_000)
  assert theory.oracle_tokens_per_call(alpha) == pytest.approx(many)
  assert theory.oracle_tokens_per_call(1.0) == np.inf


@pytest.mark.parametrize('length', [1, 2, 7, 20])
@pytest.mark.parametrize('alpha, gamma', CASES)
def test_simulated_outputs_with_a_cutoff(alpha, gamma, length):
  rng = np.random.default_rng(3)
  outputs = 5_000
  left, calls = np.full(outputs, length), np.zeros(outputs)
  while (left > 0).any():
    drawn = np.minimum(gamma, left)
    accepted = accepted_guesses(alpha, gamma, (outputs,), rng)
    accepted = np.minimum(accepted, drawn)
    extra = accepted < left
    calls += left > 0
    left = np.where(left > 0, left - accepted - extra, 0)
  assert (left == 0).all()
  assert_mean(calls, length / theory.tokens_with_cutoff(alpha, gamma, length))


def test_cutoff_matters_less_for_longer_outputs():
  alpha, gamma = np.array([0.2, 0.7, 0.95])[:, None], 7
  limit = theory.tokens_per_call(alpha, gamma)
  length = np.array([1, 5, 20, 100, 2_000])
  capped = theory.tokens_with_cutoff(alpha, gamma, length)
  assert (capped <= limit * (1 + 1e-12)).all()
  assert (capped >= limit * length / (length + gamma) * (1 - 1e-12)).all()
  assert capped[:, 0] == pytest.approx(1)


def test_cutoff_when_every_guess_is_accepted():
  length = np.arange(1, 30)
  calls = length / theory.tokens_with_cutoff(1.0, 6, length)
  assert calls == pytest.approx(np.ceil(length / 7))


def test_bound_holds_over_a_grid():
  # Exact in binary, so that alpha = c is met.
  alpha = np.arange(65)[:, None, None] / 64
  c = np.arange(40)[:, None] / 32
  speed = theory.speedup(alpha, np.arange(41), c)
  bound = theory.speedup_bound(alpha, c)[..., 0]
  assert (speed.max(axis=-1) >= bound * (1 - 1e-12)).all()
  helps = (alpha > c)[..., 0]
  assert helps.any() and not helps.all()
  assert (bound[helps] > 1).all()
  assert (bound[~helps] == 1).all()
  assert (speed[~helps] <= 1 + 1e-12).all()


def test_alpha_of_tokens_per_call_is_its_inverse():
  alpha, gamma = np.linspace(0, 1, 21)[:, None], np.array([1, 3, 8])
  tokens = theory.tokens_per_call(alpha, gamma)
  np.testing.assert_allclose(
    theory.alpha_of_tokens_per_call(tokens, gamma),
    np.broadcast_to(alpha, tokens.shape),
    atol=1e-9,
  )


def test_best_gamma_is_the_best_of_all():
  rng = np.random.default_rng(4)
  alpha = rng.uniform(0, 0.99, 300)
  c = rng.uniform(0.005, 0.6, 300)
  every = theory.speedup(alpha[:, None], np.arange(201), c[:, None])
  best = theory.best_gamma(alpha, c, max_gamma=200)
  np.testing.assert_array_equal(best, every.argmax(axis=-1))
  assert len(np.unique(best)) > 10
  capped = theory.best_gamma(alpha, c, max_gamma=4)
  np.testing.assert_array_equal(capped, every[:, :5].argmax(axis=-1))


def test_best_gamma_at_the_edges():
  alpha = np.linspace(0, 1, 101)
  assert (theory.best_gamma(alpha, alpha) == 0).all()
  assert theory.best_gamma(0.3, 2.0) == 0
  assert theory.best_gamma(0.0, 0.0) == 0
  assert theory.best_gamma(1.0, 0.999, max_gamma=40) == 40
  assert theory.best_gamma(0.01, 0.0, max_gamma=400) == 400
  assert theory.best_gamma(0.9, 0.1, max_gamma=0) == 0
  # 1.5 / 1.125, 1.75 / 1.25 and 1.875 / 1.375: the second is the largest.
  assert theory.best_gamma(0.5, 0.125) == 2
  assert isinstance(theory.best_gamma(0.8, 0.05), np.int64)


@pytest.mark.parametrize('lenience', [1.0, 0.5, 0.1])
def test_beta_is_how_often_the_test_accepts(lenience):
  rng = np.random.default_rng(5)
  for p, q in zip(*random_pairs(6, 9, seed=6), strict=True):
    guess = rng.choice(9, size=40_000, p=q)
    accepted = rng.random(40_000) * lenience * q[guess] < p[guess]
    assert_mean(accepted, theory.beta(p, q, lenience))


def test_beta_predicts_whole_iterations():
  rng = np.random.default_rng(7)
  gamma = 4
  for p, q in zip(*random_pairs(4, 6, seed=8), strict=True):
    guesses = rng.choice(6, size=(30_000, gamma), p=q)
    accepted = rng.random(guesses.shape) * q[guesses] < p[guesses]
    tokens = np.cumprod(accepted, axis=-1).sum(axis=-1) + 1
    assert_mean(tokens, theory.tokens_per_call(theory.beta(p, q), gamma))


def test_beta_grows_as_lenience_falls():
  p, q = random_pairs(50, 12, seed=9)
  betas = theory.beta(p, q, np.array([1, 0.5, 0.3, 0.1, 1e-9])[:, None])
  assert (np.diff(betas, axis=0) >= 0).all()
  assert (betas[0] < betas[3]).all()
  assert (betas <= 1).all()
  # In the limit only tokens that the target cannot emit are refused.
  reachable = np.where(p > 0, q, 0).sum(axis=-1)
  assert betas[-1] == pytest.approx(reachable, abs=1e-6)


def test_beta_by_hand():
  p, q = [0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]
  assert theory.beta(p, q) == pytest.approx(0.5)
  assert theory.beta(p, q, 0.5) == pytest.approx(0.6)
  assert theory.divergence(p, q) == pytest.approx(0.5)
  assert theory.beta(q, p, 0.25) == pytest.approx(0.9)


def test_divergence_is_a_distance():
  p, q = random_pairs(200, 8, seed=10)
  between = theory.divergence(p, q)
  np.testing.assert_array_equal(between, theory.divergence(q, p))
  assert ((between > 0) & (between < 1)).all()
  assert between == pytest.approx(1 - theory.beta(p, q), abs=1e-12)
  assert (theory.divergence(p, p) == 0).all()
  assert theory.divergence([0.5, 0.5], [0.5 + 1e-9, 0.5 - 1e-9]) > 0


def test_divergence_is_one_only_without_a_shared_token():
  assert theory.divergence([1, 0, 0], [0, 0.25, 0.75]) == 1
  assert theory.beta([1, 0, 0], [0, 0.25, 0.75]) == 0
  assert theory.divergence([1, 0, 0], [1e-9, 0.25, 0.75 - 1e-9]) < 1


def test_divergence_is_the_largest_gap_of_any_event():
  p, q = random_pairs(20, 7, seed=11)
  events = (np.arange(2**7)[:, None] >> np.arange(7)) & 1
  gaps = np.abs((p - q) @ events.T).max(axis=-1)
  assert theory.divergence(p, q) == pytest.approx(gaps, abs=1e-12)


def test_rejection_sampling_accepts_less():
  p, q = random_pairs(200, 5, seed=12)
  rate = theory.rejection_sampling_rate(p, q)
  assert (rate <= theory.beta(p, q) + 1e-12).all()
  some = (rate > 0) & (rate < 1)
  assert some.sum() > 20
  rng = np.random.default_rng(13)
  for i in np.flatnonzero(some)[:6]:
    # The least M for which p / (M q) is a probability at every draft token.
    scale = (p[i] / np.where(q[i] > 0, q[i], 1)).max()
    guess = rng.choice(5, size=40_000, p=q[i])
    accepted = rng.random(40_000) * scale * q[i][guess] < p[i][guess]
    assert_mean(accepted, rate[i])


def test_rejection_sampling_rate_by_hand():
  p = [0.5, 0.5, 0.0]
  assert theory.rejection_sampling_rate(p, [0.2, 0.4, 0.4]) == 0.4
  assert theory.rejection_sampling_rate(p, [0.0, 0.9, 0.1]) == 0
  assert theory.rejection_sampling_rate(p, p) == 1


def test_arguments_broadcast():
  alpha, gamma = np.full((3, 1, 1), 0.5), np.full((4, 1), 2)
  c = np.full(5, 0.1)
  assert theory.tokens_per_call(alpha, gamma).shape == (3, 4, 1)
  assert theory.speedup(alpha, gamma, c).shape == (3, 4, 5)
  assert theory.operations(alpha, gamma, c).shape == (3, 4, 5)
  assert theory.speedup_bound(alpha, c).shape == (3, 1, 5)
  assert theory.best_gamma(alpha, c).shape == (3, 1, 5)
  assert theory.oracle_tokens_per_call(alpha).shape == (3, 1, 1)
  length = np.arange(1, 7)
  assert theory.tokens_with_cutoff(alpha, gamma, length).shape == (3, 4, 6)
  assert theory.tokens_with_cutoff([], 2, 5).shape == (0,)
  p, q = np.full((3, 1, 4), 0.25), np.full((2, 4), 0.25)
  for function in (
    theory.divergence,
    theory.beta,
    theory.rejection_sampling_rate,
  ):
    assert function(p, q).shape == (3, 2)
  assert theory.beta(p, q, np.ones(2)).shape == (3, 2)


def test_rows_do_not_mix():
  alpha, gamma = np.array([0.0, 0.4, 0.9, 1.0]), np.array([5, 0, 3, 8])
  length = np.array([4, 30, 11, 1])
  rows = zip(alpha, gamma, length, strict=True)
  one_by_one = [theory.tokens_with_cutoff(*row) for row in rows]
  together = theory.tokens_with_cutoff(alpha, gamma, length)
  assert together == pytest.approx(one_by_one)
  c = np.array([0.2, 0.1, 0.0, 0.3])
  best = [theory.best_gamma(*row) for row in zip(alpha, c, strict=True)]
  assert list(theory.best_gamma(alpha, c)) == best


def test_scalars_and_low_precision_are_float64():
  assert isinstance(theory.speedup(0.5, 3, 0.1), np.float64)
  assert isinstance(theory.tokens_with_cutoff(0.5, 3, 8), np.float64)
  p = np.array([0.3, 0.7], np.float32)
  assert theory.divergence(p, p[::-1]).dtype == np.float64
  # A third in float16 leaves the sum slightly off 1.
  thirds = np.full(3, 1 / 3, np.float16)
  assert theory.beta(thirds, thirds) == pytest.approx(1, abs=1e-3)


HALVES = [0.5, 0.5]


@pytest.mark.parametrize(
  'call, message',
  [
    (
      lambda: theory.tokens_per_call([0.5, 1.2], 3),
      r'alpha must be in \[0, 1\], got 1\.2: pass a mean',
    ),
    (lambda: theory.oracle_tokens_per_call(-0.1), r'alpha .* got -0\.1: pass'),
    (lambda: theory.speedup(np.nan, 3, 0), r'alpha .* got nan: pass'),
    (lambda: theory.speedup_bound(2, 0), r'alpha .* got 2\.0: pass'),
    (lambda: theory.operations(1.5, 3, 0), r'alpha .* got 1\.5: pass'),
    (
      lambda: theory.alpha_of_tokens_per_call(4.5, 3),
      r'tokens must be in \[1, gamma \+ 1\], got 4\.5: pass',
    ),
    (lambda: theory.best_gamma(1.5, 0), r'alpha .* got 1\.5: pass'),
    (lambda: theory.tokens_with_cutoff(1.5, 1, 1), r'alpha .* got 1\.5: pass'),
    (
      lambda: theory.tokens_per_call(0.5, [2, -1]),
      'gamma must be a whole number >= 0, got -1: pass a count',
    ),
    (lambda: theory.speedup(0.5, 2.5, 0), r'gamma .* got 2\.5: pass'),
    (lambda: theory.operations(0.5, np.inf, 0), r'gamma .* got inf: pass'),
    (lambda: theory.tokens_with_cutoff(0.5, -2, 9), r'gamma .* got -2: pass'),
    (
      lambda: theory.tokens_with_cutoff(0.5, 2, 0),
      'length must be a whole number >= 1, got 0: pass a count',
    ),
    (
      lambda: theory.best_gamma(0.5, 0, max_gamma=-1),
      'max_gamma must be a whole number >= 0, got -1: pass a count',
    ),
    (
      lambda: theory.speedup(0.5, 3, [0.1, -0.2]),
      r'c must be finite and >= 0, got -0\.2: pass the cost of the draft',
    ),
    (lambda: theory.speedup_bound(0.5, -1), r'c must .* got -1\.0: pass'),
    (lambda: theory.best_gamma(0.5, np.inf), 'c must .* got inf: pass'),
    (lambda: theory.operations(0.5, 3, -1), r'c_hat must .* got -1\.0: pass'),
    (
      lambda: theory.beta(HALVES, HALVES, 0),
      r'lenience must be in \(0, 1\], got 0\.0: use 1',
    ),
    (lambda: theory.beta(HALVES, HALVES, 1.5), r'lenience .* got 1\.5: use 1'),
    (
      lambda: theory.divergence([2.0, 1.0], HALVES),
      r'p must sum to 1 over its last axis, got 3\.0: pass probabilities',
    ),
    (
      lambda: theory.beta(HALVES, [[0.5, 0.5], [1.25, -0.25]]),
      r'q must be >= 0, got -0\.25: pass probabilities',
    ),
    (
      lambda: theory.rejection_sampling_rate(HALVES, [0.5, 0.25, 0.25]),
      'share one vocabulary, got sizes 2 and 3: cut or pad',
    ),
    (
      lambda: theory.divergence(1.0, HALVES),
      'share one vocabulary, got sizes 1 and 2: cut or pad',
    ),
  ],
)
def test_errors_say_expected_got_and_remedy(call, message):
  with pytest.raises(ValueError, match=message):
    call()
