# SPDX-License-Identifier: Apache-2.0
"""The loop: greedy equality, counters, stopping, caches, rows, streaming."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models

from spec_decode import autoregressive
from spec_decode import sampling as sampling_lib
from spec_decode import speculative
from spec_decode.autoregressive import STOPPED_BY_EOS
from spec_decode.autoregressive import STOPPED_BY_LENGTH
from spec_decode.autoregressive import Limits
from spec_decode.drafts import ModelDraft
from spec_decode.models import transformer
from spec_decode.randomness import row_keys
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation

PLAIN, GREEDY = Sampling(), Sampling(0.0)
EOS = 2
decode, plain_decode = speculative.decode, autoregressive.decode

TOY = toy_models.table_model(6)
TOY_PARAMS = toy_models.table_params(0, 6)
TOY_INPUTS = np.array([[3], [11], [19], [27], [35], [43], [51], [59]], np.int32)

T5_CONFIG = toy_models.TINY_T5.replace(num_decoder_layers=1)
T5 = transformer.language_model(T5_CONFIG)
T5_PARAMS = toy_models.t5_params(T5_CONFIG, 0)
# Many programs of this one are compiled.
SHALLOW_CONFIG = T5_CONFIG.replace(num_encoder_layers=0)
SHALLOW = transformer.language_model(SHALLOW_CONFIG)
SHALLOW_PARAMS = toy_models.t5_params(SHALLOW_CONFIG, 0)
# A draft of another width.
NARROW_CONFIG = T5_CONFIG.replace(emb_dim=8, num_heads=2)
NARROW = transformer.language_model(NARROW_CONFIG)
NARROW_PARAMS = toy_models.t5_params(NARROW_CONFIG, 5)


def t5_inputs(rows, padded=True):
  ids = np.random.default_rng(0).integers(1, 50, (rows, 9))
  if padded:
    for row in range(rows):
      ids[row, 9 - row % 7 :] = 0
  return ids.astype(np.int32)


def assert_sound(result, limits, gamma):
  """What holds for every run, row by row."""
  r = jax.tree.map(np.asarray, result)
  np.testing.assert_array_equal(r.histogram.sum(1), r.target_calls)
  np.testing.assert_array_equal(r.histogram @ np.arange(gamma + 1), r.accepted)
  # Each call adds one token to what it accepts, except where an accepted
  # guess ends the row.
  closed = r.accepted + r.target_calls - r.length
  assert ((closed == 0) | (closed == 1)).all()
  assert (r.accepted <= r.tested).all() and (r.tested <= r.drawn).all()
  assert (r.drawn <= gamma * r.target_calls).all()
  assert (r.tested - r.accepted <= r.target_calls).all()
  assert (r.length >= 1).all() and (r.length <= limits.max_new_tokens).all()
  for tokens, log_probs, n, stop in zip(
    r.tokens, r.log_probs, r.length, r.stop
  ):
    assert (tokens[n:] == 0).all() and (log_probs[n:] == 0).all()
    assert (log_probs[:n] <= 0).all() and np.isfinite(log_probs).all()
    assert (tokens[: n - 1] != limits.eos_id).all()
    ends = tokens[n - 1] == limits.eos_id
    assert stop == (STOPPED_BY_EOS if ends else STOPPED_BY_LENGTH)
    assert ends or n == limits.max_new_tokens


def assert_same_output(one, other):
  for name in ('tokens', 'length', 'stop'):
    np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
  np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


def assert_equal_trees(one, other):
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_array_equal(a, b)


def take(result, rows):
  return jax.tree.map(lambda x: np.asarray(x)[rows], result)


# --- against plain decoding -------------------------------------------------


@pytest.mark.parametrize('sampling', [Sampling(0.7), GREEDY], ids=str)
def test_no_guesses_is_plain_decoding(sampling):
  rows, limits = 300, Limits(8, EOS)
  inputs = np.arange(rows, dtype=np.int32)[:, None] % 61
  keys = row_keys(0, np.arange(rows))
  config = Speculation(TOY, ModelDraft(TOY, sampling, 0), sampling, limits)
  result = decode(config, TOY_PARAMS, TOY_PARAMS, inputs, keys)
  plain = plain_decode(TOY, sampling, limits, TOY_PARAMS, inputs, keys)
  for name in ('tokens', 'log_probs', 'length', 'stop', 'target_calls'):
    np.testing.assert_array_equal(getattr(result, name), getattr(plain, name))
  assert_sound(result, limits, 0)
  np.testing.assert_array_equal(result.target_calls, result.length)
  assert not result.drawn.any()
  assert set(np.asarray(result.stop).tolist()) == {1, 2}


@pytest.mark.parametrize('gamma', range(1, 9))
def test_greedy_tables_equal_plain_decoding(gamma):
  limits = Limits(64, -1)
  config = Speculation(TOY, ModelDraft(TOY, GREEDY, gamma), GREEDY, limits)
  keys = row_keys(0, np.arange(8))
  good = [
    toy_models.greedy(TOY_PARAMS, i, [0], 64) for i in TOY_INPUTS[:, 0].tolist()
  ]
  calls = []
  for draft_params in (
    toy_models.nearby(TOY_PARAMS, 1),
    toy_models.mixed(TOY_PARAMS, 2),
    toy_models.never_right(TOY_PARAMS),
    TOY_PARAMS,
  ):
    result = decode(config, TOY_PARAMS, draft_params, TOY_INPUTS, keys)
    np.testing.assert_array_equal(result.tokens, good)
    assert_sound(result, limits, gamma)
    calls.append(np.asarray(result.target_calls))
  near, _, never, equal = calls
  assert ((equal < near) & (near < never)).any() and (near <= never).all()
  # A draft that is never right: one token per call, every guess tested first.
  assert (never == 64).all()
  # The target as its own draft: gamma + 1 tokens per call up to the cap.
  assert (equal == -(-64 // (gamma + 1))).all()
  np.testing.assert_array_equal(result.accepted, result.drawn)
  left = 64 % (gamma + 1)
  assert (result.histogram[:, gamma] >= 64 // (gamma + 1)).all()
  assert (result.drawn == 64 // (gamma + 1) * gamma + left).all()


@pytest.mark.parametrize(
  'rows, gamma', [(8, g) for g in range(1, 9)] + [(1, 3), (3, 4)]
)
def test_greedy_networks_equal_plain_decoding(rows, gamma):
  limits = Limits(64, -1)
  config = Speculation(
    SHALLOW, ModelDraft(SHALLOW, GREEDY, gamma), GREEDY, limits
  )
  keys = row_keys(0, np.arange(8))
  draft_params = toy_models.perturbed(SHALLOW_PARAMS, 1, 0.1)
  for padded in (False, True):
    inputs = t5_inputs(8, padded)
    good = plain_decode(SHALLOW, GREEDY, limits, SHALLOW_PARAMS, inputs, keys)
    good = take(good, slice(rows))
    args = inputs[:rows], keys[:rows]
    result = decode(config, SHALLOW_PARAMS, draft_params, *args)
    assert_same_output(result, good)
    assert_sound(result, limits, gamma)
    total = np.asarray(result.histogram).sum(0)
    assert total[0] > 0 and total[gamma] > 0
  # The target as its own draft never fails.
  result = decode(config, SHALLOW_PARAMS, SHALLOW_PARAMS, *args)
  assert_same_output(result, good)
  np.testing.assert_array_equal(result.accepted, result.drawn)
  assert (result.target_calls == -(-64 // (gamma + 1))).all()


# --- stopping and counting --------------------------------------------------


def simulate(target, draft, gamma, cap, eos_id):
  """Counts of one row in which both models follow scripts."""
  out, calls, drawn, accepted, tested = [], 0, 0, 0, 0
  histogram = np.zeros(gamma + 1, int)
  stop = None
  while stop is None:
    at = len(out)
    guesses = []
    for token in draft[at : at + min(gamma, cap - at)]:
      guesses.append(token)
      if token == eos_id:
        break
    n = 0
    while n < len(guesses) and guesses[n] == target[at + n]:
      n += 1
    new = guesses[:n]
    if not (new and new[-1] == eos_id) and at + n < cap:
      new.append(target[at + n])
    out += new
    calls, drawn, accepted = calls + 1, drawn + len(guesses), accepted + n
    tested += min(n + 1, len(guesses))
    histogram[n] += 1
    if new[-1] == eos_id:
      stop = STOPPED_BY_EOS
    elif len(out) == cap:
      stop = STOPPED_BY_LENGTH
  return {
    'tokens': out + [0] * (cap - len(out)),
    'length': len(out),
    'stop': stop,
    'target_calls': calls,
    'drawn': drawn,
    'accepted': accepted,
    'tested': tested,
    'histogram': histogram,
  }


def scripts(rows, length, seed):
  """Scripts of targets and of drafts that follow for a while."""
  rng = np.random.default_rng(seed)
  target = rng.integers(3, 12, (rows, length))
  target[rng.random(target.shape) < 0.06] = EOS
  agreement = rng.choice([0.0, 0.5, 0.8, 0.95, 1.0], (rows, 1))
  other = rng.integers(2, 12, (rows, length))
  draft = np.where(rng.random(target.shape) < agreement, target, other)
  return target.astype(np.int32), draft.astype(np.int32)


def run_scripts(target, draft, gamma, limits):
  model = toy_models.scripted_model()
  config = Speculation(model, ModelDraft(model, GREEDY, gamma), GREEDY, limits)
  rows = len(target)
  result = decode(
    config,
    {'script': jnp.asarray(target, jnp.int32)},
    {'script': jnp.asarray(draft, jnp.int32)},
    np.zeros((rows, 1), np.int32),
    row_keys(0, np.arange(rows)),
  )
  assert_sound(result, limits, gamma)
  return result


@pytest.mark.parametrize('gamma, cap', [(1, 9), (4, 14), (6, 3)])
def test_every_counter_of_scripted_rows(gamma, cap):
  target, draft = scripts(200, 40, seed=gamma)
  result = run_scripts(target, draft, gamma, Limits(cap, EOS))
  good = [
    simulate(*row, gamma, cap, EOS)
    for row in zip(target.tolist(), draft.tolist())
  ]
  for name in good[0]:
    np.testing.assert_array_equal(
      getattr(result, name), [row[name] for row in good], err_msg=name
    )
  assert set(np.asarray(result.stop).tolist()) == {1, 2}
  assert (np.asarray(result.histogram).sum(0) > 0).sum() == min(gamma, cap) + 1


@pytest.mark.parametrize(
  'target, draft, cap, tokens, accepted, calls, drawn',
  [
    # EOS inside an accepted block: nothing after it, no extra token.
    ([7, EOS, 9, 9], [7, EOS, 9, 9], 8, [7, EOS], 2, 1, 2),
    # EOS as the first guess.
    ([EOS, 5, 5, 5], [EOS, 9, 9, 9], 8, [EOS], 1, 1, 1),
    # EOS as the extra token, after a rejection and after a full block.
    ([7, EOS, 9, 9], [7, 8, 9, 9], 8, [7, EOS], 1, 1, 4),
    ([7, 6, 9, 8, EOS], [7, 6, 9, 8, 3], 8, [7, 6, 9, 8, EOS], 4, 1, 4),
    # An EOS that the target rejects ends nothing.
    ([7, 6, EOS, 9], [7, EOS, 9, 9], 8, [7, 6, EOS], 1, 2, 6),
    # The cap cuts a block; guesses beyond it were never drawn.
    ([7, 6, 9, 8], [7, 6, 9, 8], 3, [7, 6, 9], 3, 1, 3),
    ([7, 6, 9, 8], [7, 6, 5, 8], 3, [7, 6, 9], 2, 1, 3),
    ([7, 6, 9, 8], [5, 5, 9, 8], 3, [7, 6, 9], 1, 3, 6),
    # EOS before the cap wins, EOS on the cap is the reason, EOS after it is
    # not seen.
    ([7, EOS, 9, 8], [7, EOS, 9, 8], 3, [7, EOS], 2, 1, 2),
    ([7, 6, EOS, 8], [7, 6, EOS, 8], 3, [7, 6, EOS], 3, 1, 3),
    ([7, 6, 5, EOS], [7, 6, 5, EOS], 3, [7, 6, 5], 3, 1, 3),
  ],
)
def test_where_a_row_ends(target, draft, cap, tokens, accepted, calls, drawn):
  rest = [4] * 20
  # Other rows of the batch go on for longer, or not at all.
  targets = [[5] * 24, (target + rest)[:24], [EOS] * 24]
  drafts = [[6] * 24, (draft + rest)[:24], [6] * 24]
  result = run_scripts(np.array(targets), np.array(drafts), 4, Limits(cap, EOS))
  assert result.tokens[1].tolist() == tokens + [0] * (cap - len(tokens))
  assert result.length[1] == len(tokens)
  assert result.stop[1] == (1 if tokens[-1] == EOS else 2)
  assert result.accepted[1] == accepted
  assert result.target_calls[1] == calls
  assert result.drawn[1] == drawn
  assert result.length.tolist()[::2] == [cap, 1]
  assert result.target_calls.tolist()[::2] == [cap, 1]


# --- one sampled run, step by step ------------------------------------------


@dataclasses.dataclass
class Trace:
  """A run of `stream`: states as NumPy, the first before any block."""

  config: Speculation
  args: tuple
  blocks: list
  states: list

  @property
  def result(self):
    return speculative.result(self.config, self.states[-1])

  @functools.cached_property
  def decoded(self):
    return decode(self.config, *self.args)


def as_numpy(state):
  return jax.tree.map(np.array, state.replace(keys=()))


def trace(config, *args):
  params, draft_params, inputs, keys, *prompt = args
  caches = speculative.start(config, params, draft_params, inputs, *prompt)
  init = jax.jit(speculative.init, static_argnums=0)
  states = [as_numpy(init(config, params, caches, keys, *prompt))]
  blocks = []
  for block, state in speculative.stream(config, *args):
    blocks.append(block)
    states.append(as_numpy(state))
  return Trace(config, args, blocks, states)


@pytest.fixture(scope='module')
def toy_trace():
  config = Speculation(
    TOY,
    ModelDraft(TOY, Sampling(1.2), 3),
    PLAIN,
    Limits(21, EOS),
    measure_beta=True,
  )
  prompt = np.array([[0, 1, 4], [0, 9, 9], [0, 5, 9], [3, 3, 3]] * 2, np.int32)
  prompt = prompt, np.array([3, 1, 2, 3] * 2, np.int32)
  keys = row_keys(3, np.arange(8))
  params = TOY_PARAMS, toy_models.mixed(TOY_PARAMS, 3)
  return trace(config, *params, TOY_INPUTS, keys, prompt)


@pytest.fixture(scope='module')
def t5_trace():
  config = Speculation(T5, ModelDraft(NARROW, PLAIN, 3), PLAIN, Limits(21, 7))
  keys = row_keys(4, np.arange(8))
  return trace(config, T5_PARAMS, NARROW_PARAMS, t5_inputs(8), keys)


@pytest.fixture(params=['toy', 't5'])
def run(request):
  return request.getfixturevalue(f'{request.param}_trace')


def test_a_stream_is_a_decode(run):
  assert_sound(run.result, run.config.limits, 3)
  names = {f.name for f in dataclasses.fields(run.result)} - {'log_probs'}
  for name in names:
    np.testing.assert_array_equal(
      getattr(run.result, name), getattr(run.decoded, name), err_msg=name
    )
  np.testing.assert_allclose(
    run.result.log_probs, run.decoded.log_probs, atol=1e-5
  )
  measured = run.config.measure_beta
  assert (np.isnan(run.result.beta_tested) != measured).all()
  # Rows end for both reasons and at different steps; blocks of every size.
  assert set(np.asarray(run.result.stop).tolist()) == {1, 2}
  assert len(set(np.asarray(run.result.target_calls).tolist())) >= 3
  assert (np.asarray(run.result.histogram).sum(0) > 0).all()


def test_blocks_add_up_to_the_result(run):
  result = run.result
  for row in range(8):
    tokens, log_probs = [], []
    for block in run.blocks:
      n = block.count[row]
      assert block.accepted[row] <= block.drawn[row]
      accepted = block.accepted[row]
      np.testing.assert_array_equal(
        block.tokens[row, :accepted], block.guesses[row, :accepted]
      )
      assert n in (accepted, accepted + 1)
      tokens += block.tokens[row, :n].tolist()
      log_probs += block.log_probs[row, :n].tolist()
    length = int(result.length[row])
    assert tokens == result.tokens[row, :length].tolist()
    assert log_probs == result.log_probs[row, :length].tolist()
  total = lambda name: sum(getattr(block, name) for block in run.blocks)
  np.testing.assert_array_equal(total('count'), result.length)
  np.testing.assert_array_equal(total('drawn'), result.drawn)
  np.testing.assert_array_equal(total('accepted'), result.accepted)
  calls = sum(block.count > 0 for block in run.blocks)
  np.testing.assert_array_equal(calls, result.target_calls)


def test_finished_rows_are_frozen(run):
  rows_of = lambda state: [
    leaf.reshape(8, -1) for leaf in jax.tree.leaves(state)
  ]
  ended = np.argmax([state.sequences.stop > 0 for state in run.states], axis=0)
  assert ended.min() < ended.max() - 1
  for row, step in enumerate(ended):
    final = rows_of(run.states[step])
    for state, block in zip(run.states[step + 1 :], run.blocks[step:]):
      for before, after in zip(final, rows_of(state)):
        np.testing.assert_array_equal(before[row], after[row])
      assert block.count[row] == block.drawn[row] == block.accepted[row] == 0


def draft_entries(state, block):
  """How many of its tokens each row's draft cache must hold."""
  # All but the last two; of these only the older may be missing, and only
  # until the next block, after a block in which all guesses stood.
  length = state.sequences.length - np.where(block.count == 4, 2, 1)
  return np.where(block.count > 0, length, 0)  # ended rows stay as they were


def test_toy_caches_hold_the_committed_tokens(toy_trace):
  full = 0
  for state, block in zip(toy_trace.states[1:], toy_trace.blocks):
    tokens = state.sequences.tokens
    assert tokens.shape == state.target_cache['tokens'].shape
    place = np.arange(tokens.shape[1])
    valid = place < state.sequences.length[:, None] - 1
    held = state.target_cache['tokens']
    np.testing.assert_array_equal(held[valid], tokens[valid])
    valid = place < draft_entries(state, block)[:, None]
    held = state.draft_cache['tokens']
    np.testing.assert_array_equal(held[valid], tokens[valid])
    full += (block.count == 4).sum()
  assert full > 3


@functools.partial(jax.jit, static_argnums=0)
def prefill(model, params, inputs, tokens):
  cache = model.start(params, inputs, tokens.shape[1])
  zeros = jnp.zeros(tokens.shape[0], jnp.int32)
  return model.extend(params, cache, tokens, zeros)[1]


def test_t5_caches_equal_a_fresh_prefill(t5_trace):
  params, draft_params, inputs, _ = t5_trace.args
  full = 0
  for state, block in zip(t5_trace.states[1:], t5_trace.blocks):
    tokens = state.sequences.tokens
    for model, some_params, cache, entries in (
      (T5, params, state.target_cache, state.sequences.length - 1),
      (NARROW, draft_params, state.draft_cache, draft_entries(state, block)),
    ):
      fresh = prefill(model, some_params, inputs, tokens)
      for field in ('keys', 'values', 'cross_keys', 'cross_values'):
        for one, other in zip(getattr(cache, field), getattr(fresh, field)):
          if field.endswith('keys'):
            one, other = one.mT, other.mT  # [B * H, L, D], as values are
          split = lambda x: np.asarray(x).reshape(8, -1, *x.shape[1:])
          one, other = split(one), split(other)
          for row, valid in enumerate(entries):
            valid = None if field.startswith('cross') else valid
            np.testing.assert_allclose(
              one[row, :, :valid], other[row, :, :valid], atol=2e-5
            )
    full += (block.count == 4).sum()
  assert full > 3


def test_the_hidden_state_is_the_one_the_last_token_came_from(toy_trace):
  # In the toy model it is the row of logits itself.
  table = np.asarray(TOY_PARAMS['table'])
  for state, block in zip(toy_trace.states[1:], toy_trace.blocks):
    for row in np.flatnonzero(block.count):
      tokens = state.sequences.tokens[row, : state.sequences.length[row] - 1]
      where = toy_models.context(tokens, TOY_INPUTS[row, 0])
      np.testing.assert_array_equal(state.hidden[row], table[where])


def test_log_probs_equal_teacher_forcing_on_tables(toy_trace):
  result, (prompt, lengths) = toy_trace.result, toy_trace.args[4]
  table = np.asarray(TOY_PARAMS['table'], np.float64)
  # The plain softmax: without the mask of the padding id.
  log_p = table - np.log(np.exp(table).sum(-1, keepdims=True))
  for row in range(8):
    tokens = prompt[row, : lengths[row]].tolist()
    for i in range(result.length[row]):
      where = toy_models.context(np.array(tokens), TOY_INPUTS[row, 0])
      token = int(result.tokens[row, i])
      assert abs(result.log_probs[row, i] - log_p[where, token]) < 1e-5
      tokens.append(token)


def test_log_probs_equal_teacher_forcing_of_a_t5(t5_trace):
  params, _, inputs, _ = t5_trace.args
  result = t5_trace.result
  shifted = np.pad(np.asarray(result.tokens), ((0, 0), (1, 0)))[:, :-1]
  apply = jax.jit(
    transformer.Transformer(T5_CONFIG).apply, static_argnames='enable_dropout'
  )
  logits = apply({'params': params}, inputs, shifted, enable_dropout=False)
  good = sampling_lib.token_log_probs(logits, result.tokens)
  real = np.arange(21) < np.asarray(result.length)[:, None]
  np.testing.assert_allclose(
    result.log_probs, np.where(real, good, 0), atol=1e-4
  )
  assert np.abs(good[real]).max() > 1


def test_beta_is_summed_over_the_tested_guesses(toy_trace):
  draft_params = toy_trace.args[1]
  exact = np.zeros(8)
  for state, block in zip(toy_trace.states, toy_trace.blocks):
    for row in range(8):
      tokens = state.sequences.tokens[row, : state.sequences.length[row]]
      tested = min(block.accepted[row] + 1, block.drawn[row])
      for i in range(tested):
        prefix = np.concatenate([tokens, block.guesses[row, :i]])
        where = toy_models.context(prefix, TOY_INPUTS[row, 0])
        p, q = (
          np.asarray(sampling_lib.distribution(x['table'][where], sampling))
          for x, sampling in (
            (TOY_PARAMS, PLAIN),
            (draft_params, Sampling(1.2)),
          )
        )
        exact[row] += np.minimum(p, q).sum()
  np.testing.assert_allclose(toy_trace.result.beta_tested, exact, atol=1e-4)


def sample(draft_params, limits):
  """3000 sampled rows of the toy model, 4 guesses a block."""
  config = Speculation(
    TOY, ModelDraft(TOY, PLAIN, 4), PLAIN, limits, measure_beta=True
  )
  inputs = np.arange(3000, dtype=np.int32)[:, None] % 61
  keys = row_keys(5, np.arange(3000))
  result = decode(config, TOY_PARAMS, draft_params, inputs, keys)
  assert_sound(result, limits, 4)
  return result


def test_beta_tested_predicts_acceptance():
  result = sample(toy_models.mixed(TOY_PARAMS, 3), Limits(23, -1))
  tested, accepted = int(result.tested.sum()), int(result.accepted.sum())
  # Each test is one coin of probability beta, whatever came before it.
  assert tested > 10_000
  gap = accepted - float(result.beta_tested.sum())
  assert abs(gap) < 4 * np.sqrt(0.25 * tested)
  assert 0.2 < accepted / tested < 0.9
  # Another quantity, which it must not be mistaken for.
  assert accepted / tested > accepted / int(result.drawn.sum()) + 0.05


def test_the_target_as_its_own_draft_is_always_accepted_when_sampling():
  result = sample(TOY_PARAMS, Limits(23, -1))
  # Four blocks of five; then three guesses, which the cap ends without an
  # extra token.
  assert (result.target_calls == 5).all()
  np.testing.assert_array_equal(result.accepted, result.drawn)
  np.testing.assert_array_equal(
    result.histogram, np.tile([0, 0, 0, 1, 4], (3000, 1))
  )
  np.testing.assert_allclose(result.beta_tested, result.tested, atol=1e-4)
  assert len(np.unique(result.tokens, axis=0)) > 2700


def test_steps_without_jit():
  # Greedy, since random numbers take long without a compiler.
  target, draft = scripts(5, 40, seed=10)
  model = toy_models.scripted_model()
  limits = Limits(5, EOS)
  config = Speculation(model, ModelDraft(model, GREEDY, 3), GREEDY, limits)
  params = {'script': jnp.asarray(target)}, {'script': jnp.asarray(draft)}
  inputs, keys = jnp.zeros((5, 1), jnp.int32), row_keys(0, np.arange(5))
  with jax.disable_jit():
    caches = speculative.start(config, *params, inputs)
    state = speculative.init(config, params[0], caches, keys)
    for _ in range(limits.max_new_tokens):
      state, _ = speculative.step(config, *params, state)
    result = speculative.result(config, state)
  assert_sound(result, limits, 3)
  assert_equal_trees(result, run_scripts(target, draft, 3, limits))


def test_a_stream_leaves_its_arguments_alone(toy_trace):
  # Its own state is donated from step to step; a second run must work.
  assert not any(
    isinstance(x, jax.Array) and x.is_deleted()
    for x in jax.tree.leaves(toy_trace.args)
  )
  config, args = toy_trace.config, jax.tree.map(jnp.asarray, toy_trace.args)
  first = next(iter(speculative.stream(config, *args)))[0]
  again = next(iter(speculative.stream(config, *args)))[0]
  assert_equal_trees(first, again)
  assert_equal_trees(first, toy_trace.blocks[0])
  assert not any(x.is_deleted() for x in jax.tree.leaves(args))


# --- rows, prompts and vocabularies -----------------------------------------


def test_a_row_does_not_depend_on_its_batch(t5_trace):
  params, draft_params, inputs, _ = t5_trace.args
  together = take(t5_trace.decoded, slice(None))

  def run(ids):
    ids = np.array(ids)
    keys = row_keys(4, ids)
    return take(
      decode(t5_trace.config, params, draft_params, inputs[ids], keys),
      slice(None),
    )

  def assert_rows(result, ids):
    for field in dataclasses.fields(result):
      one, other = (getattr(x, field.name) for x in (result, together))
      if field.name == 'log_probs':
        np.testing.assert_allclose(one, other[ids], atol=1e-5)
      else:
        np.testing.assert_array_equal(one, other[ids], err_msg=field.name)

  for ids in ([5, 2, 7, 0, 1, 6, 3, 4], [3, 3, 3, 1, 1, 0, 7, 3]):
    assert_rows(run(ids), ids)
  for row in range(8):
    assert_rows(run([row]), [row])
  assert len(np.unique(together.tokens, axis=0)) == 8


def test_prompts_of_different_lengths():
  gamma, limits = 3, Limits(20, EOS)
  config = Speculation(TOY, ModelDraft(TOY, GREEDY, gamma), GREEDY, limits)
  rng = np.random.default_rng(6)
  prompt = rng.integers(0, 6, (8, 5)).astype(np.int32)
  length = np.array([1, 5, 3, 2, 4, 1, 5, 2], np.int32)
  args = TOY_PARAMS, toy_models.nearby(TOY_PARAMS, 1), TOY_INPUTS
  keys = row_keys(0, np.arange(8))
  result = decode(config, *args, keys, (prompt, length))
  assert_sound(result, limits, gamma)
  plain = plain_decode(
    TOY, GREEDY, limits, TOY_PARAMS, TOY_INPUTS, keys, (prompt, length)
  )
  assert_same_output(result, plain)
  for row, n in enumerate(length):
    good = toy_models.greedy(
      TOY_PARAMS, TOY_INPUTS[row, 0], prompt[row, :n].tolist(), 20, EOS
    )
    assert result.tokens[row, : result.length[row]].tolist() == good
  # What stands in the prompts beyond their lengths is not read.
  junk = np.where(np.arange(5) < length[:, None], prompt, 5 - prompt)
  assert_equal_trees(result, decode(config, *args, keys, (junk, length)))


@pytest.mark.parametrize(
  'sampling, mask',
  [
    (Sampling(0.0), True),
    (Sampling(0.0, vocab_size=6), True),
    (Sampling(0.0, vocab_size=0, forbidden=()), False),
  ],
)
def test_likely_ids_beyond_the_vocabulary_and_padding(sampling, mask):
  # The target's logits are 9 wide, the draft's 7, of which 6 ids are real.
  params = toy_models.table_params(4, 9)
  params = {'table': params['table'].at[:, 0].add(1).at[:, 6:].add(1)}
  draft_params = {'table': toy_models.nearby(params, 1, 0.3)['table'][:, :7]}
  gamma, limits = 3, Limits(24, -1)
  config = Speculation(TOY, ModelDraft(TOY, sampling, gamma), sampling, limits)
  keys = row_keys(0, np.arange(8))
  result = decode(config, params, draft_params, TOY_INPUTS, keys)
  assert_sound(result, limits, gamma)
  plain = plain_decode(TOY, sampling, limits, params, TOY_INPUTS, keys)
  assert_same_output(result, plain)
  allowed = np.arange(1, 6) if mask else np.arange(9)
  good = [
    toy_models.greedy(params, i, [0], 24, allowed=allowed)
    for i in TOY_INPUTS[:, 0].tolist()
  ]
  np.testing.assert_array_equal(result.tokens, good)
  tokens = np.asarray(result.tokens)
  assert (tokens == 0).any() == (tokens >= 6).any() == (not mask)
  assert (np.asarray(result.histogram).sum(0) > 0).all()


def test_padding_rows_that_end_at_once_cost_nothing():
  # Rows whose first token is EOS make one call, whatever the others do.
  target, draft = scripts(6, 40, seed=9)
  target[target == EOS] = 5
  target[::2] = EOS
  result = run_scripts(target, draft, 4, Limits(14, EOS))
  assert result.target_calls[::2].tolist() == [1, 1, 1]
  assert result.length.tolist() == [1, 14] * 3


# --- refusals ---------------------------------------------------------------


@pytest.mark.parametrize(
  'change, message',
  [
    ({'lenience': 0.0}, r'lenience in \(0, 1\], got 0\.0\. 1 is exact'),
    ({'lenience': 1.5}, r'lenience in \(0, 1\], got 1\.5'),
    ({'draft': ModelDraft(TOY, PLAIN, -1)}, 'gamma >= 0, got -1'),
    (
      {'draft': ModelDraft(toy_models.table_model(5), PLAIN, 2)},
      'one vocabulary, got 6 and 5 ids. Train or choose a draft',
    ),
  ],
)
def test_errors_say_expected_got_and_remedy(change, message):
  good = {
    'target': TOY,
    'draft': ModelDraft(TOY, PLAIN, 2),
    'sampling': PLAIN,
    'limits': Limits(4),
  }
  Speculation(**good)
  with pytest.raises(ValueError, match=message):
    Speculation(**(good | change))
