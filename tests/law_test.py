# SPDX-License-Identifier: Apache-2.0
"""The law of whole sequences, by enumeration, against 200,000 samples.

Rows have three inputs and prompts of two lengths; drafts are near the target,
unrelated, never right or equal to it, depending on the context.
"""

import dataclasses

import chi_squared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy_models

from spec_decode import autoregressive
from spec_decode import speculative
from spec_decode.autoregressive import Limits
from spec_decode.drafts import ModelDraft
from spec_decode.language_model import Proposal
from spec_decode.randomness import row_keys
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation

SAMPLES = 200_000
EOS = 2
LIMITS = Limits(max_new_tokens=4, eos_id=EOS)
# Input id and decoder prompt of the rows, in turn.
STARTS = [(5, (0,)), (17, (0,)), (40, (0, 3))]
PLAIN = Sampling()
# Fast enough to compile and to run: these tests do much of both.
decode = jax.jit(
  speculative.decode.__wrapped__,
  static_argnums=0,
  compiler_options={'xla_backend_optimization_level': 1},
)


def batch():
  """Inputs, keys and prompts of the rows."""
  start = np.arange(SAMPLES) % len(STARTS)
  inputs = np.array([[input_id] for input_id, _ in STARTS], np.int32)
  prompt = np.ones((len(STARTS), 2), np.int32)  # junk where one is short
  for row, (_, tokens) in zip(prompt, STARTS):
    row[: len(tokens)] = tokens
  length = np.array([len(tokens) for _, tokens in STARTS], np.int32)
  keys = row_keys(11, np.arange(SAMPLES))
  return inputs[start], keys, (prompt[start], length[start])


def speculate(draft, params, draft_params, sampling, vocab, lenience=1.0):
  """Samples of the toy model; fails where a count of guesses never stood."""
  model = toy_models.table_model(vocab)
  config = Speculation(model, draft, sampling, LIMITS, lenience)
  result = decode(config, params, draft_params, *batch())
  assert (np.asarray(result.histogram).sum(0) > 1000).all()
  return result


def assert_law(result, law_of):
  """Chi-squared over (start, sequence) against `law_of(start)`."""
  digits = 8 ** np.arange(1, LIMITS.max_new_tokens + 1)
  code = lambda start, tokens: (
    start
    + sum((token + 1) * digit for token, digit in zip(tokens, digits.tolist()))
  )
  law = {
    code(i, tokens): p / len(STARTS)
    for i, start in enumerate(STARTS)
    for tokens, p in law_of(start).items()
  }
  assert sum(law.values()) == pytest.approx(1)
  tokens, length = np.asarray(result.tokens), np.asarray(result.length)
  real = np.arange(len(digits)) < length[:, None]
  start = np.arange(SAMPLES) % len(STARTS)
  samples = start + np.where(real, tokens + 1, 0) @ digits
  chi_squared.assert_follows(samples.tolist(), law)


def after(params, start, sampling):
  """prefix of new tokens -> its law, from the tables."""
  input_id, prompt = start
  standardize = lambda logits: reference.standardize(
    logits[: sampling.vocab_size or None],
    sampling.temperature,
    sampling.top_k,
    sampling.top_p,
    sampling.forbidden,
  )
  return lambda prefix: toy_models.probabilities(
    params, (*prompt, *prefix), input_id, standardize
  )


def exact_law(params, sampling):
  return lambda start: reference.law(
    after(params, start, sampling), LIMITS.max_new_tokens, EOS
  )


@dataclasses.dataclass(frozen=True)
class VaryingDraft(ModelDraft):
  """Draws fewer guesses by a rule of the past; the rest are placeholders."""

  def propose(self, params, cache, tokens, length, *args) -> Proposal:
    full = super().propose(params, cache, tokens, length, *args)
    rows = jnp.arange(length.shape[0])
    last = tokens.at[rows, length - 1].get(mode='clip')
    count = (last + length) % (self.gamma + 1)
    undrawn = jnp.arange(self.gamma) >= count[:, None]
    return full.replace(
      tokens=jnp.where(undrawn, -1, full.tokens),
      count=count,
      q=jnp.where(undrawn[..., None], 0.0, full.q),
    )


# vocabulary, target's sampling, draft's sampling, gamma
CASES = {
  'temperature 1': (6, PLAIN, PLAIN, 2),
  'temperature 0.7, padding': (
    4,
    Sampling(0.7, forbidden=()),
    Sampling(0.7, forbidden=()),
    3,
  ),
  'top-k': (6, Sampling(top_k=3), Sampling(top_k=3), 1),
  'both': (5, Sampling(0.9, 3, 0.8), Sampling(0.9, 3, 0.8), 1),
  'argmax': (4, Sampling(0.0), PLAIN, 2),
  'argmax draft': (6, PLAIN, Sampling(0.0), 2),
}


@pytest.mark.parametrize(
  'kind, low, high',
  [
    ('nearby', 0.5, 0.95),
    ('unrelated', 0.2, 0.6),
    ('never right', 0.0, 0.4),
    ('equal', 1.0, 1.0),
  ],
)
def test_law_with_drafts_of_one_kind(kind, low, high):
  vocab, sampling, draft_sampling, gamma = CASES['temperature 1']
  params = toy_models.table_params(vocab, vocab)
  draft_params = {
    'nearby': toy_models.nearby(params, 2),
    'unrelated': toy_models.table_params(99, vocab),
    'never right': toy_models.never_right(params),
    'equal': params,
  }[kind]
  model = toy_models.table_model(vocab)
  draft = ModelDraft(model, draft_sampling, gamma)
  config = Speculation(model, draft, sampling, LIMITS)
  result = decode(config, params, draft_params, *batch())
  assert low <= result.accepted.sum() / result.tested.sum() <= high
  assert_law(result, exact_law(params, sampling))


@pytest.mark.parametrize('case', CASES)
def test_law_of_speculative_decoding(case):
  vocab, sampling, draft_sampling, gamma = CASES[case]
  params = toy_models.table_params(vocab, vocab)
  draft = ModelDraft(toy_models.table_model(vocab), draft_sampling, gamma)
  draft_params = toy_models.mixed(params, 1)
  result = speculate(draft, params, draft_params, sampling, vocab)
  assert_law(result, exact_law(params, sampling))


def test_law_with_top_p_and_a_varying_number_of_guesses():
  vocab, sampling = 5, Sampling(top_p=0.7)
  params = toy_models.table_params(7, vocab)
  draft = VaryingDraft(toy_models.table_model(vocab), sampling, 2)
  draft_params = toy_models.mixed(params, 8)
  result = speculate(draft, params, draft_params, sampling, vocab)
  fewer = np.asarray(result.drawn < result.target_calls)
  assert 0.1 < fewer.mean() < 0.9
  assert_law(result, exact_law(params, sampling))


@pytest.mark.parametrize('width', [4, 11])
def test_law_with_another_sampling_and_padded_logits(width):
  # Target 8 wide, 5 real ids; the rest is likely but masked. The narrow draft
  # cannot guess the last id, the wide one guesses what the target cannot emit.
  sampling = Sampling(0.8, top_k=4, vocab_size=5)
  params = toy_models.table_params(3, 8)
  params = {'table': params['table'].at[:, 5:].add(2)}
  draft = ModelDraft(
    toy_models.table_model(5), Sampling(1.6, vocab_size=9, forbidden=()), 2
  )
  draft_params = toy_models.mixed(params, 4, width)
  result = speculate(draft, params, draft_params, sampling, 5)
  assert (result.tokens < 5).all() and (result.tokens == 4).any()
  assert_law(result, exact_law(params, sampling))


def test_law_of_plain_decoding():
  vocab, sampling, _, _ = CASES['temperature 1']
  params = toy_models.table_params(vocab, vocab)
  model = toy_models.table_model(vocab)
  result = autoregressive.decode(model, sampling, LIMITS, params, *batch())
  assert_law(result, exact_law(params, sampling))


def lenient_law(params, draft_params, sampling, gamma, lenience):
  """start -> law of sequences under the lenient rule."""

  def law_of(start):
    p, q = after(params, start, sampling), after(draft_params, start, PLAIN)
    plain = after(params, start, PLAIN)
    if sampling.greedy:
      rule = lambda prefix: reference.argmax_rule(
        plain(prefix), q(prefix), lenience
      )
    else:
      rule = lambda prefix: reference.sampling_rule(
        p(prefix), q(prefix), lenience
      )
    length = LIMITS.max_new_tokens
    return reference.speculative_law(rule, p, gamma, length, EOS)

  return law_of


@pytest.mark.parametrize('temperature', [1.0, 0.0])
def test_law_of_lenient_decoding(temperature):
  vocab, gamma, lenience = 5, 2, 0.4
  sampling = Sampling(temperature)
  params = toy_models.table_params(9, vocab)
  draft_params = toy_models.mixed(params, 10)
  draft = ModelDraft(toy_models.table_model(vocab), PLAIN, gamma)
  result = speculate(draft, params, draft_params, sampling, vocab, lenience)
  law_of = lenient_law(params, draft_params, sampling, gamma, lenience)
  assert_law(result, law_of)
  # It is not the exact law, yet each token stays below p / l.
  exact_of = exact_law(params, sampling)
  gap = 0.0
  for start in STARTS:
    lenient, exact = law_of(start), exact_of(start)
    gap = max(gap, max(abs(lenient[s] - exact.get(s, 0.0)) for s in lenient))
    if temperature > 0:
      for sequence, mass in lenient.items():
        assert mass <= exact[sequence] / lenience ** len(sequence) + 1e-12
  assert gap > 0.02


@pytest.mark.parametrize('gamma', [1, 3])
def test_the_two_enumerations_agree_without_lenience(gamma):
  params = toy_models.table_params(12, 5)
  draft_params = toy_models.mixed(params, 13)
  law_of = lenient_law(params, draft_params, PLAIN, gamma, 1.0)
  exact_of = exact_law(params, PLAIN)
  for start in STARTS:
    blockwise, exact = law_of(start), exact_of(start)
    assert set(blockwise) == set(exact)
    for sequence, mass in exact.items():
      assert blockwise[sequence] == pytest.approx(mass, abs=1e-12)
