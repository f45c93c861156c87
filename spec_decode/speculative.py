# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: Algorithm 1 for batches, as one compiled loop.

A step lets the draft guess, has the target score all guesses in one call, and
commits the accepted ones and one token more. The same `step` runs under
`lax.while_loop` (`decode`) and in a Python loop (`stream`).

Shape letters: B rows, S buffer length, G guesses per block (gamma), N new
tokens at most, E hidden size, V ids.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_decode import acceptance
from spec_decode import autoregressive
from spec_decode import randomness
from spec_decode import sampling as sampling_lib
from spec_decode.autoregressive import Limits
from spec_decode.autoregressive import Sequences
from spec_decode.language_model import PARKED
from spec_decode.language_model import Draft
from spec_decode.language_model import LanguageModel
from spec_decode.sampling import Sampling

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Speculation:
  """One decoding configuration; hashable, hence static under jit.

  Attributes:
    target: the model whose distribution the output has.
    draft: what guesses; it holds gamma and its own sampling.
    sampling: the target's.
    limits: when rows end.
    lenience: l of appendix A.5; below 1 the output is no longer exact.
    measure_beta: also sum beta over the tested guesses. Reads the whole
      vocabulary at every position, so it is not free.
    verify: decides which guesses stand; `acceptance.Replayed` for simulations.
  """

  target: LanguageModel
  draft: Draft
  sampling: Sampling
  limits: Limits
  lenience: float = 1.0
  measure_beta: bool = False
  verify: Callable[..., tuple[Array, Array]] = acceptance.verify

  def __post_init__(self):
    if not 0 < self.lenience <= 1:
      raise ValueError(
        f'Expected lenience in (0, 1], got {self.lenience}. 1 is exact.'
      )
    if self.draft.gamma < 0:
      raise ValueError(f'Expected gamma >= 0, got {self.draft.gamma}.')
    if self.draft.vocab_size != self.target.vocab_size:
      raise ValueError(
        'Expected target and draft to have one vocabulary, got'
        f' {self.target.vocab_size} and {self.draft.vocab_size} ids. Train'
        ' or choose a draft with the vocabulary of the target.'
      )
    sampling = self.sampling.within(self.target.vocab_size)
    object.__setattr__(self, 'sampling', sampling)


@struct.dataclass
class State:
  """Carried from block to block."""

  sequences: Sequences
  target_cache: Any  # holds all committed tokens but the last
  draft_cache: Any
  hidden: Array  # [B, E], the target's, where the last token came from
  keys: Array  # one per row, constant
  target_calls: Array  # int32 [B]
  drawn: Array  # int32 [B], guesses drawn, tested or not
  histogram: Array  # int32 [B, G + 1], calls by number of accepted guesses
  beta_sum: Array  # [B], over tested guesses; 0 unless measured
  tested: Array  # int32 [B], guesses up to and with the first rejected


@struct.dataclass
class Block:
  """What one step did: for streaming and traces."""

  tokens: Array  # int32 [B, G + 1], committed tokens, junk after `count`
  count: Array  # int32 [B], tokens committed
  guesses: Array  # int32 [B, G]
  drawn: Array  # int32 [B], valid guesses
  accepted: Array  # int32 [B]
  log_probs: Array  # [B, G + 1]


@struct.dataclass
class Result(autoregressive.Result):
  """What was decoded and how: `accepted` + extra tokens = `length`.

  Guesses beyond an EOS or the length cap count as never drawn, and a row that
  such a guess ends gets no extra token.
  """

  drawn: Array  # int32 [B], guesses drawn
  accepted: Array  # int32 [B], guesses accepted
  histogram: Array  # int32 [B, G + 1], sums to target_calls
  tested: Array  # int32 [B], guesses up to and with the first rejected one
  beta_tested: Array  # [B], sum of beta over `tested`; NaN unless measured


def block_room(gamma: int) -> int:
  """Positions beyond the cap that a block may need, from the token before."""
  return gamma + 2


Caches = tuple[Any, Any]  # of the target and of the draft


@functools.partial(jax.jit, static_argnums=(0, 4))
def _start_draft(draft: Draft, draft_params, inputs, prompt, capacity) -> Any:
  return draft.start(draft_params, inputs, prompt, capacity)


def start(
  config: Speculation,
  params: Any,
  draft_params: Any,
  inputs: Any,
  prompt: tuple[Array, Array] | None = None,
) -> Caches:
  """The caches before the first block; arguments as `decode`.

  What depends on inputs and prompts alone. Two programs, so that the target's
  serves all its drafts, samplings and seeds.
  """
  prompt, _ = prompt or autoregressive.default_prompt(inputs)
  room = block_room(config.draft.gamma)
  capacity = autoregressive.capacity(prompt, config.limits, room)
  return (
    autoregressive.jitted_prefill(
      config.target, params, inputs, prompt, capacity
    ),
    _start_draft(config.draft, draft_params, inputs, prompt, capacity),
  )


def init(
  config: Speculation,
  params: Any,
  caches: Caches,
  keys: Array,
  prompt: tuple[Array, Array] | None = None,
) -> State:
  """State before the first block, with the caches that `start` made."""
  prompt, length = prompt or autoregressive.default_prompt(keys)
  gamma = config.draft.gamma
  target_cache, draft_cache = caches
  hidden = jax.eval_shape(
    lambda: config.target.extend(params, target_cache, prompt[:, :1], length)[0]
  )
  zeros = jnp.zeros_like(length)
  return State(
    sequences=autoregressive.begin(
      prompt, length, config.limits, block_room(gamma)
    ),
    target_cache=target_cache,
    draft_cache=draft_cache,
    hidden=jnp.zeros((hidden.shape[0], hidden.shape[2]), hidden.dtype),
    keys=keys,
    target_calls=zeros,
    drawn=zeros,
    histogram=jnp.zeros((length.shape[0], gamma + 1), jnp.int32),
    beta_sum=jnp.zeros(length.shape, jnp.float32),
    tested=zeros,
  )


def step(
  config: Speculation, params: Any, draft_params: Any, state: State
) -> tuple[State, Block]:
  """One iteration of Algorithm 1 for every running row."""
  sequences, running = state.sequences, state.sequences.running
  keys = randomness.block_keys(state.keys, sequences.length, state.target_calls)
  size = config.sampling.vocab_size or target_width(
    config.target, params, state
  )
  # Line 1: guesses, and the distributions they were drawn from.
  proposal = config.draft.propose(
    draft_params,
    state.draft_cache,
    sequences.tokens,
    jnp.where(running, sequences.length, PARKED),
    randomness.with_role(keys, randomness.GUESS),
    state.hidden,
    size,
  )
  drawn = _drawn(proposal, sequences, config.limits.eos_id)
  # Line 2: one call of the target scores them all.
  chunk = jnp.concatenate(
    [sequences.last_token[:, None], proposal.tokens], axis=1
  )
  hidden, target_cache = config.target.extend(
    params, state.target_cache, chunk, sequences.position
  )
  logits = config.target.logits(params, hidden)
  # Lines 3 and 4: how many stand, and the token after them.
  accepted, extra = config.verify(
    logits,
    proposal.tokens,
    drawn,
    proposal.q,
    *_uniforms(keys, config),
    config.sampling,
    config.lenience,
  )
  # Line 5: commit them.
  offset = jnp.arange(config.draft.gamma + 1)
  padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
  tokens = jnp.where(offset < accepted[:, None], padded, extra[:, None])
  log_probs = sampling_lib.token_log_probs(logits, tokens)
  closed = _closed(tokens, accepted, sequences, config.limits.eos_id)
  count = jnp.where(running, accepted + jnp.where(closed, 0, 1), 0)
  block = Block(
    tokens=tokens,
    count=count,
    guesses=proposal.tokens,
    drawn=jnp.where(running, drawn, 0),
    accepted=jnp.where(running, accepted, 0),
    log_probs=log_probs,
  )
  state = state.replace(
    sequences=sequences.append(tokens, log_probs, count, config.limits.eos_id),
    target_cache=target_cache,
    draft_cache=proposal.cache,
    hidden=_last_hidden(state.hidden, hidden, count),
  )
  return _count(config, state, block, running, logits, proposal.q), block


def target_width(target: LanguageModel, params: Any, state: State) -> int:
  """Width V of the target's logits."""
  logits = jax.eval_shape(target.logits, params, state.hidden)
  return logits.shape[-1]


def _uniforms(keys: Array, config: Speculation) -> tuple[Array, Array]:
  """Random numbers of the test [B, G] and of the extra token [B, 2]."""
  with_role, uniforms = randomness.with_role, randomness.uniforms
  return (
    uniforms(with_role(keys, randomness.TEST), config.draft.gamma),
    uniforms(with_role(keys, randomness.EXTRA), 2),
  )


def _drawn(proposal, sequences: Sequences, eos_id: int) -> Array:
  """Guesses that count as drawn: none beyond an EOS or the length cap."""
  is_eos = proposal.tokens == eos_id
  after_eos = jnp.cumsum(is_eos, axis=1) - is_eos > 0
  before_eos = jnp.sum(~after_eos, axis=1, dtype=jnp.int32)
  room = sequences.limit - sequences.length
  return jnp.minimum(proposal.count, jnp.minimum(before_eos, room))


def _closed(tokens, accepted, sequences: Sequences, eos_id: int) -> Array:
  """Whether the accepted guesses already end the row."""
  rows = jnp.arange(accepted.shape[0])
  last = tokens[rows, jnp.maximum(accepted - 1, 0)]
  full = sequences.length + accepted >= sequences.limit
  return full | ((accepted > 0) & (last == eos_id))


def _last_hidden(old: Array, hidden: Array, count: Array) -> Array:
  """Hidden state that each row's last committed token came from."""
  rows = jnp.arange(count.shape[0])
  new = hidden[rows, jnp.maximum(count - 1, 0)]
  return jnp.where((count > 0)[:, None], new, old)


def _count(config, state: State, block: Block, running, logits, q) -> State:
  """Adds one block to the counters of the rows that were running."""
  gamma = config.draft.gamma
  hit = (jnp.arange(gamma + 1) == block.accepted[:, None]) & running[:, None]
  tested = jnp.minimum(block.accepted + 1, block.drawn)
  beta_sum = state.beta_sum
  if config.measure_beta and gamma > 0:
    beta = acceptance.acceptance_probability(
      logits[:, :-1], block.guesses, q, config.sampling, config.lenience
    )
    beta_sum += jnp.sum(
      jnp.where(jnp.arange(gamma) < tested[:, None], beta, 0.0), axis=1
    )
  return state.replace(
    target_calls=state.target_calls + running,
    drawn=state.drawn + block.drawn,
    histogram=state.histogram + hit,
    beta_sum=beta_sum,
    tested=state.tested + tested,
  )


def finish(
  config: Speculation, params: Any, draft_params: Any, state: State
) -> State:
  """Steps until every row has ended."""
  return lax.while_loop(
    lambda state: jnp.any(state.sequences.running),
    lambda state: step(config, params, draft_params, state)[0],
    state,
  )


def result(config: Speculation, state: State) -> Result:
  """What a finished state says."""
  offset = jnp.arange(config.draft.gamma + 1)
  beta = state.beta_sum if config.measure_beta else state.beta_sum * jnp.nan
  return Result(
    **autoregressive.new_tokens(state.sequences, config.limits),
    target_calls=state.target_calls,
    drawn=state.drawn,
    accepted=jnp.sum(state.histogram * offset, axis=1),
    histogram=state.histogram,
    tested=state.tested,
    beta_tested=beta,
  )


@functools.partial(jax.jit, static_argnums=0)
def decode_from(
  config: Speculation,
  params: Any,
  draft_params: Any,
  caches: Caches,
  keys: Array,
  prompt: tuple[Array, Array] | None = None,
) -> Result:
  """`decode` with the caches that `start` made: a program of the loop alone."""
  state = init(config, params, caches, keys, prompt)
  return result(config, finish(config, params, draft_params, state))


@functools.partial(jax.jit, static_argnums=0)
def decode(
  config: Speculation,
  params: Any,
  draft_params: Any,
  inputs: Any,
  keys: Array,
  prompt: tuple[Array, Array] | None = None,
) -> Result:
  """Decodes a batch speculatively.

  With lenience 1 every row is distributed exactly as
  `autoregressive.decode` with the same target and sampling would have it.

  Args:
    config: static; build it once, a new one compiles anew.
    params: the target's, as `config.target.prepare` returns them.
    draft_params: the draft's, as `config.draft.prepare` returns them.
    inputs: what both models start from, batch axis first.
    keys: from `randomness.row_keys`.
    prompt: (tokens [B, P], lengths [B]) to go on from; default one id 0.
  """
  caches = start(config, params, draft_params, inputs, prompt)
  return decode_from(config, params, draft_params, caches, keys, prompt)


_jitted_init = jax.jit(init, static_argnums=0)
_jitted_step = jax.jit(step, static_argnums=0, donate_argnums=3)


def stream(
  config: Speculation,
  params: Any,
  draft_params: Any,
  inputs: Any,
  keys: Array,
  prompt: tuple[Array, Array] | None = None,
) -> Iterator[tuple[Block, State]]:
  """Decodes as `decode` does, yielding each block as it is committed.

  Blocks come as NumPy; the state that comes with one is valid until the next
  is asked for. The last state gives `result(config, state)`.
  """
  caches = start(config, params, draft_params, inputs, prompt)
  state = _jitted_init(config, params, caches, keys, prompt)
  while np.any(state.sequences.running):
    state, block = _jitted_step(config, params, draft_params, state)
    yield jax.device_get(block), state
