# SPDX-License-Identifier: Apache-2.0
"""Plain decoding, the baseline, against loops in NumPy."""

import functools

import jax
import numpy as np
import pytest
import toy_models

from spec_decode import autoregressive
from spec_decode import sampling as sampling_lib
from spec_decode.autoregressive import STOPPED_BY_EOS
from spec_decode.autoregressive import STOPPED_BY_LENGTH
from spec_decode.autoregressive import Limits
from spec_decode.models import transformer
from spec_decode.randomness import row_keys
from spec_decode.sampling import Sampling

TOY = toy_models.table_model(6)
PARAMS = toy_models.table_params(0, 6)
INPUTS = np.array([[3], [11], [19], [27], [35], [43]], np.int32)
PROMPT = np.array(
  [[0, 4, 4], [0, 1, 4], [5, 5, 5], [0, 3, 2], [2, 0, 0], [1, 2, 4]], np.int32
)
LENGTH = np.array([1, 2, 3, 2, 1, 3], np.int32)
EOS = 2
GREEDY = Sampling(0.0)


def keys(rows=6, seed=0):
  return row_keys(seed, np.arange(rows))


def decode(sampling, limits, prompt=(PROMPT, LENGTH), params=PARAMS):
  return autoregressive.decode(
    TOY, sampling, limits, params, INPUTS, keys(), prompt
  )


def expected(limits, params=PARAMS, allowed=None):
  return [
    toy_models.greedy(
      params,
      INPUTS[row, 0],
      PROMPT[row, : LENGTH[row]].tolist(),
      limits.max_new_tokens,
      limits.eos_id,
      allowed,
    )
    for row in range(6)
  ]


@pytest.mark.parametrize(
  'limits', [Limits(9, EOS), Limits(1, EOS), Limits(25, -1)], ids=str
)
def test_greedy_equals_a_loop_in_numpy(limits):
  result = decode(GREEDY, limits)
  cap = limits.max_new_tokens
  for row, good in enumerate(expected(limits)):
    n = int(result.length[row])
    assert result.tokens[row].tolist() == good + [0] * (cap - len(good))
    assert n == len(good) == result.target_calls[row]
    ends = good[-1] == limits.eos_id
    assert result.stop[row] == (STOPPED_BY_EOS if ends else STOPPED_BY_LENGTH)
    assert (result.log_probs[row, n:] == 0).all()
    assert (result.log_probs[row, :n] < 0).all()
  if cap == 9:
    assert set(np.asarray(result.stop).tolist()) == {1, 2}


def test_the_default_prompt_is_one_id_0():
  zeros = np.zeros((6, 1), np.int32), np.ones(6, np.int32)
  good = decode(GREEDY, Limits(9, EOS), zeros)
  result = decode(GREEDY, Limits(9, EOS), None)
  np.testing.assert_array_equal(result.tokens, good.tokens)


def test_sampling_that_leaves_one_id_is_greedy():
  good = decode(GREEDY, Limits(9, EOS))
  for sampling in (Sampling(1e-6), Sampling(top_k=1)):
    result = decode(sampling, Limits(9, EOS))
    np.testing.assert_array_equal(result.tokens, good.tokens)


def test_a_mask_hides_padding_and_ids_beyond_the_vocabulary():
  params = {'table': PARAMS['table'].at[:, [0, 4, 5]].add(2)}
  sampling = Sampling(0.0, vocab_size=5)
  limits = Limits(9, EOS)
  result = decode(sampling, limits, params=params)
  good = expected(limits, params, allowed=np.arange(1, 5))
  for row in range(6):
    assert result.tokens[row, : result.length[row]].tolist() == good[row]
  off = decode(Sampling(0.0, forbidden=()), limits, params=params)
  good = expected(limits, params, allowed=np.arange(6))
  for row in range(6):
    assert off.tokens[row, : off.length[row]].tolist() == good[row]
  assert (off.tokens == 5).any() and not (result.tokens == 5).any()
  assert any(0 in row for row in good)


def test_step_by_step_with_rows_that_end():
  limits, sampling = Limits(9, EOS), Sampling()
  prompt = PROMPT, LENGTH
  cache = autoregressive.start(TOY, limits, PARAMS, INPUTS, prompt)
  state = autoregressive.init(limits, cache, keys(), prompt)
  step = jax.jit(
    functools.partial(autoregressive.step, TOY, sampling, limits, PARAMS)
  )
  states = [state]
  while np.any(states[-1].sequences.running):
    states.append(step(states[-1]))
  states = [jax.tree.map(np.asarray, s.replace(keys=())) for s in states]
  ended = np.argmax([s.sequences.stop > 0 for s in states], axis=0)
  assert ended.min() < ended.max() - 1
  for row, at in enumerate(ended):
    for state in states[at:]:
      for before, after in zip(
        jax.tree.leaves(states[at]), jax.tree.leaves(state)
      ):
        np.testing.assert_array_equal(before[row], after[row])
  for state in states:
    # Entries of all tokens but the last, as a fresh prefill has them.
    held, tokens = state.cache['tokens'], state.sequences.tokens
    valid = np.arange(tokens.shape[1]) < state.sequences.length[:, None] - 1
    if state is not states[0]:
      np.testing.assert_array_equal(held[valid], tokens[valid])
  result = decode(sampling, limits)
  fields = autoregressive.new_tokens(states[-1].sequences, limits)
  for name, value in fields.items():
    np.testing.assert_array_equal(value, getattr(result, name), err_msg=name)
  np.testing.assert_array_equal(states[-1].target_calls, result.target_calls)


def test_a_t5_follows_its_own_teacher_forced_argmax():
  config = toy_models.TINY_T5
  params = toy_models.t5_params(config, 3)
  model = transformer.language_model(config)
  inputs = np.random.default_rng(1).integers(1, 50, (4, 8)).astype(np.int32)
  inputs[1, 5:] = inputs[3, 2:] = 0
  limits = Limits(24, -1)
  result = autoregressive.decode(model, GREEDY, limits, params, inputs, keys(4))
  shifted = np.pad(np.asarray(result.tokens), ((0, 0), (1, 0)))[:, :-1]
  logits = jax.jit(
    transformer.Transformer(config).apply, static_argnames='enable_dropout'
  )({'params': params}, inputs, shifted, enable_dropout=False)
  best = np.asarray(logits)[..., 1:].argmax(-1) + 1
  np.testing.assert_array_equal(result.tokens, best)
  good = sampling_lib.token_log_probs(logits, result.tokens)
  np.testing.assert_allclose(result.log_probs, good, atol=1e-4)
  assert len(np.unique(best, axis=0)) == 4


def test_a_row_does_not_depend_on_its_batch():
  limits, sampling = Limits(9, EOS), Sampling(0.8)
  ids = np.array([4, 0, 5, 2, 2, 1])
  together = decode(sampling, limits)
  prompt = PROMPT[ids], LENGTH[ids]
  other = autoregressive.decode(
    TOY, sampling, limits, PARAMS, INPUTS[ids], row_keys(0, ids), prompt
  )
  for one, two in zip(jax.tree.leaves(together), jax.tree.leaves(other)):
    np.testing.assert_array_equal(np.asarray(one)[ids], two)
  for row in (1, 3):
    some = slice(row, row + 1)
    alone = autoregressive.decode(
      TOY,
      sampling,
      limits,
      PARAMS,
      INPUTS[some],
      row_keys(0, np.arange(6)[some]),
      (PROMPT[some], LENGTH[some]),
    )
    for one, two in zip(jax.tree.leaves(together), jax.tree.leaves(alone)):
      np.testing.assert_array_equal(np.asarray(one)[some], two)
  reseeded = autoregressive.decode(
    TOY, sampling, limits, PARAMS, INPUTS, keys(seed=1), (PROMPT, LENGTH)
  )
  assert (np.asarray(reseeded.tokens) != together.tokens).any(axis=1).sum() > 3


def test_limits_say_expected_and_got():
  with pytest.raises(ValueError, match='max_new_tokens >= 1, got 0'):
    Limits(0)
