# SPDX-License-Identifier: Apache-2.0
"""Drafts without a network: exact output law, exact q, and their own rules."""

import dataclasses
import functools

import chi_squared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy_models

from spec_decode import autoregressive
from spec_decode import randomness
from spec_decode import speculative
from spec_decode.autoregressive import Limits
from spec_decode.copy_draft import CopyDraft
from spec_decode.drafts import NGramDraft
from spec_decode.drafts import UniformDraft
from spec_decode.language_model import PARKED
from spec_decode.models import ngram
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation

VOCAB = 5
EOS = 1
# The target's table is wider than its vocabulary, as T5's are.
WIDTH = 7
SAMPLING = Sampling(vocab_size=VOCAB)
TARGET = toy_models.table_model(VOCAB)
PARAMS = toy_models.table_params(3, WIDTH)
# Rows differ in their first input, which the target's law depends on.
INPUTS = np.array([[2, 4, 3, 2, 1, 0], [3, 2, 2, 4, 3, 1], [4, 3, 1, 0, 0, 0]])
COUNT = 51_000


@functools.cache
def tables(order):
  """Tables of a random text in which every id follows some more often."""
  rng = np.random.default_rng(order)
  texts = [rng.choice([1, 2, 2, 3, 4], size=6) for _ in range(12)]
  return jax.tree.map(
    jnp.asarray, ngram.count(texts, VOCAB, order, successors=2)
  )


def ngram_draft(gamma=3, **sampling):
  return NGramDraft(VOCAB, Sampling(**sampling), gamma)


DRAFTS = {
  'unigram': (ngram_draft(), tables(1)),
  'bigram': (ngram_draft(), tables(2)),
  'trigram': (ngram_draft(), tables(3)),
  'bigram, cold': (ngram_draft(temperature=0.6), tables(2)),
  'bigram, top-k': (ngram_draft(top_k=2), tables(2)),
  'bigram, certain': (ngram_draft(temperature=0), tables(2)),
  'uniform': (UniformDraft(VOCAB, 3), None),
  'copy': (CopyDraft(VOCAB, 3), None),
  'copy, picky': (CopyDraft(VOCAB, 3, shortest=2, longest=2), None),
}


def for_drafts(*names):
  return pytest.mark.parametrize(
    'draft, params', [DRAFTS[name] for name in names], ids=names
  )


one_of_a_kind = for_drafts('bigram', 'uniform', 'copy')


def keys(rows, seed=0):
  return randomness.row_keys(seed, np.arange(rows))


def rows_of(result):
  """Tokens of each row, as tuples."""
  return [
    tuple(tokens[:length].tolist())
    for tokens, length in zip(*jax.device_get((result.tokens, result.length)))
  ]


@pytest.mark.parametrize(
  'name, eos_id',
  [(name, EOS) for name in DRAFTS] + [('bigram', -1), ('copy', -1)],
)
def test_output_has_the_law_of_the_target(name, eos_id):
  draft, params = DRAFTS[name]
  limits = Limits(max_new_tokens=4, eos_id=eos_id)
  config = Speculation(TARGET, draft, SAMPLING, limits)
  inputs = np.tile(INPUTS, (COUNT // 3, 1))
  result = speculative.decode(config, PARAMS, params, inputs, keys(COUNT))
  samples = rows_of(result)
  standardize = lambda z: reference.standardize(z[:VOCAB])
  for i, row in enumerate(INPUTS):
    step = lambda prefix, start=row[0]: toy_models.probabilities(
      PARAMS, (0, *prefix), start, standardize
    )
    chi_squared.assert_follows(samples[i::3], reference.law(step, 4, eos_id))
  # The test has to see guesses that stand and guesses that fall.
  accepted, tested = np.sum(result.accepted), np.sum(result.tested)
  assert 0 < accepted < tested


@for_drafts('trigram', 'bigram, certain', 'uniform', 'copy')
def test_greedy_output_is_that_of_plain_decoding(draft, params):
  limits = Limits(max_new_tokens=12, eos_id=-1)
  greedy = Sampling(temperature=0, vocab_size=VOCAB)
  plain = autoregressive.decode(TARGET, greedy, limits, PARAMS, INPUTS, keys(3))
  config = Speculation(TARGET, draft, greedy, limits)
  result = speculative.decode(config, PARAMS, params, INPUTS, keys(3))
  np.testing.assert_array_equal(result.tokens, plain.tokens)


@for_drafts('bigram', 'copy')
@pytest.mark.parametrize('gamma', [0, 6])
def test_gamma_is_free(draft, params, gamma):
  draft = dataclasses.replace(draft, gamma=gamma)
  config = Speculation(TARGET, draft, SAMPLING, Limits(9, EOS))
  result = speculative.decode(config, PARAMS, params, INPUTS, keys(3))
  assert np.all(result.drawn <= gamma * result.target_calls)
  plain = autoregressive.decode(
    TARGET, SAMPLING, Limits(9, EOS), PARAMS, INPUTS, keys(3)
  )
  if gamma == 0:
    np.testing.assert_array_equal(result.tokens, plain.tokens)


@for_drafts('bigram', 'copy')
def test_streaming_leaves_the_inputs_alone(draft, params):
  config = Speculation(TARGET, draft, SAMPLING, Limits(9, EOS))
  inputs = jnp.asarray(INPUTS)
  decoded = speculative.decode(config, PARAMS, params, inputs, keys(3))
  for _ in range(2):  # a donated buffer would be gone the second time
    for _, state in speculative.stream(config, PARAMS, params, inputs, keys(3)):
      result = speculative.result(config, state)
    np.testing.assert_array_equal(result.tokens, decoded.tokens)


@functools.partial(jax.jit, static_argnames=('draft', 'size'))
def propose(draft, params, text, length, inputs=INPUTS, size=WIDTH):
  """One block of guesses for rows of text [B, S]."""
  rows, capacity = text.shape
  cache = draft.start(params, jnp.asarray(inputs), text[:, :1], capacity)
  hidden = jnp.zeros((rows, 1))
  return draft.propose(params, cache, text, length, keys(rows), hidden, size)


@for_drafts('bigram', 'bigram, certain', 'uniform', 'copy')
def test_rows_that_ended_disturb_nothing(draft, params):
  text = np.array([[0, 2, 3, 2, 3, 9, 9], [0, 4, 4, 9, 9, 9, 9]])
  running = propose(draft, params, text, np.array([5, 3]), INPUTS[:2])
  length = np.array([5, 3, PARKED])
  for order in ([0, 1, 0], [0, 1, 1]):
    mixed = propose(draft, params, text[order], length, INPUTS[order])
    for name in ('tokens', 'count', 'q'):
      some, all_ = getattr(running, name), getattr(mixed, name)
      if some is not None:
        np.testing.assert_array_equal(all_[:2], some)


@one_of_a_kind
def test_junk_after_the_text_is_not_read(draft, params):
  text = np.array([[0, 2, 3, 2, 3, 4, 4, 4]] * 3)
  junk = np.where(np.arange(8) < 5, text, 2)
  length = np.array([5, 5, 5])
  some = propose(draft, params, text, length)
  other = propose(draft, params, junk, length)
  np.testing.assert_array_equal(some.tokens, other.tokens)
  np.testing.assert_array_equal(some.count, other.count)


@pytest.mark.parametrize(
  'name', [name for name in DRAFTS if 'copy' not in name and 'cert' not in name]
)
def test_q_is_what_the_guesses_are_drawn_from(name):
  draft, params = DRAFTS[name]
  count = 50_000
  text = np.tile([[0, 2, 3]], (count, 1))
  proposal = jax.device_get(propose(draft, params, text, np.full(count, 3)))
  assert proposal.q.shape == (count, 3, WIDTH)
  np.testing.assert_allclose(proposal.q.sum(-1), 1, rtol=1e-5)
  assert np.all(proposal.q[..., [0, 5, 6]] == 0)  # padding and unreal ids
  law = {}
  guesses = [tuple(row) for row in proposal.tokens.tolist()]
  for guess, q in dict(zip(guesses, proposal.q)).items():
    law[guess] = np.prod(q[np.arange(3), list(guess)], dtype=np.float64)
  chi_squared.assert_follows(guesses, law)


@pytest.mark.parametrize(
  'order, sampling',
  [
    (1, {}),
    (2, {'temperature': 0.6}),
    (2, {'top_k': 2}),
    (3, {'top_p': 0.7}),
  ],
)
def test_q_is_the_standardized_table(order, sampling):
  draft = ngram_draft(**sampling)
  text = np.array([[0, 2, 3, 2], [0, 4, 3, 4], [0, 0, 0, 0]])
  length = np.array([4, 3, 1])
  proposal = propose(draft, tables(order), text, length)
  for row in range(3):
    seen = [ngram.NONE] * 3 + text[row, : length[row]].tolist()
    for i, guess in enumerate(proposal.tokens[row].tolist()):
      context = np.array(seen[len(seen) - order + 1 :], np.int32)
      table = ngram.probabilities(tables(order), context)
      expected = reference.standardize(np.log(table), **sampling)
      q = proposal.q[row, i]
      np.testing.assert_allclose(q[:VOCAB], expected, rtol=1e-4, atol=1e-7)
      assert q[guess] > 0
      seen.append(guess)


def test_certain_guesses_are_the_most_likely_ids():
  draft = ngram_draft(temperature=0)
  text = np.array([[0, 2], [0, 3], [0, 4]])
  proposal = propose(draft, tables(2), text, np.array([2, 2, 1]))
  assert proposal.q is None
  for last, guesses in zip([2, 3, 0], proposal.tokens.tolist()):
    for guess in guesses:
      table = np.array(ngram.probabilities(tables(2), np.array([last])))
      assert guess == 1 + np.argmax(table[1:])
      last = guess


def test_uniform_guesses_spread_over_allowed_ids():
  draft = UniformDraft(VOCAB, gamma=2, forbidden=(0, 3))
  proposal = propose(draft, None, np.zeros((3, 4), int), np.ones(3, int))
  expected = np.array([0, 1, 1, 0, 1, 0, 0]) / 3
  np.testing.assert_allclose(
    proposal.q, np.broadcast_to(expected, (3, 2, WIDTH)), rtol=1e-6
  )


def test_bigrams_are_accepted_more_often_than_unigrams_on_markov_text():
  rng = np.random.default_rng(0)
  p = rng.dirichlet(np.full(20, 0.2), size=20)
  text = [0]
  for _ in range(20_000):
    text.append(rng.choice(20, p=p[text[-1]]))
  share = np.bincount(text, minlength=20) / len(text)
  alpha = []
  for order in (1, 2):
    made = ngram.count([text], 20, order, successors=8)
    q = ngram.probabilities(made, np.arange(20, dtype=np.int32)[:, None])
    alpha.append(share @ np.minimum(p, q).sum(-1))
  assert alpha[0] < 0.5 < 0.9 < alpha[1]


def test_tables_of_another_vocabulary_are_refused():
  with pytest.raises(ValueError, match='Expected tables of 6 ids, got 5'):
    NGramDraft(6, Sampling(), 3).prepare(tables(2))
  prepared = ngram_draft().prepare(tables(2))
  assert jax.tree.structure(prepared) == jax.tree.structure(tables(2))
