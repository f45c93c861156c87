# SPDX-License-Identifier: Apache-2.0
"""Plain decoding, one token per target call: the baseline of every claim.

Also what both loops keep per row: `Sequences`. Shape letters: B rows, S buffer
length (prompt + new tokens + room for one block), N new tokens at most.
"""

import dataclasses
import functools
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp

from spec_decode import randomness
from spec_decode import sampling as sampling_lib
from spec_decode.language_model import PARKED
from spec_decode.language_model import LanguageModel
from spec_decode.sampling import Sampling

Array = jax.Array

# Why a row ended.
RUNNING = 0
STOPPED_BY_EOS = 1
STOPPED_BY_LENGTH = 2


@dataclasses.dataclass(frozen=True)
class Limits:
  """When a row ends.

  Attributes:
    max_new_tokens: length cap, EOS included, prompt not.
    eos_id: ends a row wherever it is committed; -1 for none.
  """

  max_new_tokens: int
  eos_id: int = 1

  def __post_init__(self):
    if self.max_new_tokens < 1:
      raise ValueError(
        f'Expected max_new_tokens >= 1, got {self.max_new_tokens}.'
      )


@struct.dataclass
class Sequences:
  """Committed tokens of a batch."""

  tokens: Array  # int32 [B, S], prompt then new tokens, zeros after
  log_probs: Array  # [B, S], the target's, under its plain softmax
  length: Array  # int32 [B], tokens committed, prompt included
  start: Array  # int32 [B], length of the prompt
  limit: Array  # int32 [B], length at which the row must end
  stop: Array  # int32 [B], RUNNING or why it ended

  @property
  def running(self) -> Array:
    return self.stop == RUNNING

  @property
  def position(self) -> Array:
    """Where the last committed token stands; PARKED for ended rows."""
    return jnp.where(self.running, self.length - 1, PARKED)

  @property
  def last_token(self) -> Array:
    return self.tokens[jnp.arange(self.length.shape[0]), self.length - 1]

  def append(
    self, tokens: Array, log_probs: Array, count: Array, eos_id: int
  ) -> 'Sequences':
    """Commits the first count[b] of tokens [B, W]; EOS may only be the last."""
    rows, width = tokens.shape
    offset = jnp.arange(width)
    index = jnp.where(
      offset < count[:, None], self.length[:, None] + offset, PARKED
    )
    write = lambda x, y: x.at[jnp.arange(rows)[:, None], index].set(
      y, mode='drop'
    )
    length = self.length + count
    last = jnp.maximum(count - 1, 0)
    ended = (count > 0) & (tokens[jnp.arange(rows), last] == eos_id)
    stop = jnp.where(length >= self.limit, STOPPED_BY_LENGTH, RUNNING)
    stop = jnp.where(ended, STOPPED_BY_EOS, stop)
    return self.replace(
      tokens=write(self.tokens, tokens),
      log_probs=write(self.log_probs, log_probs),
      length=length,
      stop=jnp.where(self.running, stop, self.stop),
    )


@struct.dataclass
class Result:
  """What was decoded, row by row."""

  tokens: Array  # int32 [B, N], new tokens (EOS included), zeros after
  length: Array  # int32 [B], number of new tokens
  stop: Array  # int32 [B], STOPPED_BY_EOS or STOPPED_BY_LENGTH
  log_probs: Array  # [B, N], of each token under the target's plain softmax
  target_calls: Array  # int32 [B], target calls while the row was running


def default_prompt(inputs: Any) -> tuple[Array, Array]:
  """The prompt of T5: id 0 in every row. Returns (prompt, lengths)."""
  rows = jax.tree.leaves(inputs)[0].shape[0]
  return jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32)


def begin(
  prompt: Array, prompt_length: Array, limits: Limits, room: int
) -> Sequences:
  """Sequences that hold the prompts [B, P] only, with `room` to spare."""
  rows, width = prompt.shape
  size = capacity(prompt, limits, room)
  tokens = jnp.zeros((rows, size), jnp.int32)
  real = jnp.arange(width) < prompt_length[:, None]
  return Sequences(
    tokens=tokens.at[:, :width].set(jnp.where(real, prompt, 0)),
    log_probs=jnp.zeros((rows, size), jnp.float32),
    length=prompt_length,
    start=prompt_length,
    limit=prompt_length + limits.max_new_tokens,
    stop=jnp.zeros((rows,), jnp.int32),
  )


def new_tokens(sequences: Sequences, limits: Limits) -> dict[str, Array]:
  """The fields of `Result` that `Sequences` holds."""
  count = sequences.length - sequences.start
  offset = jnp.arange(limits.max_new_tokens)
  index = sequences.start[:, None] + offset
  real = offset < count[:, None]
  take = lambda x: jnp.where(real, jnp.take_along_axis(x, index, axis=1), 0)
  return {
    'tokens': take(sequences.tokens),
    'log_probs': take(sequences.log_probs),
    'length': count,
    'stop': sequences.stop,
  }


def prefill(
  model: LanguageModel, params: Any, inputs: Any, prompt: Array, capacity: int
) -> Any:
  """A model's cache after its inputs and the prompts [B, P].

  The last token of a prompt is fed again with the first block, at the same
  place, so short prompts need no care: what follows them is overwritten.
  """
  cache = model.start(params, inputs, capacity)
  if prompt.shape[1] > 1:
    position = jnp.zeros((prompt.shape[0],), jnp.int32)
    _, cache = model.extend(params, cache, prompt, position)
  return cache


@struct.dataclass
class State:
  """Carried from token to token."""

  sequences: Sequences
  cache: Any
  keys: Array  # one per row, constant
  target_calls: Array  # int32 [B]


_ROOM = 2  # positions beyond the cap
jitted_prefill = jax.jit(prefill, static_argnums=(0, 4))


def capacity(prompt: Array, limits: Limits, room: int = _ROOM) -> int:
  """Tokens that a row may come to hold after its prompt [B, P]."""
  return prompt.shape[1] + limits.max_new_tokens + room


def start(
  model: LanguageModel,
  limits: Limits,
  params: Any,
  inputs: Any,
  prompt: tuple[Array, Array] | None = None,
) -> Any:
  """The cache before the first token; arguments as `decode`.

  What depends on inputs and prompts alone: a program of its own, which serves
  every sampling and seed.
  """
  prompt, _ = prompt or default_prompt(inputs)
  return jitted_prefill(model, params, inputs, prompt, capacity(prompt, limits))


def init(
  limits: Limits,
  cache: Any,
  keys: Array,
  prompt: tuple[Array, Array] | None = None,
) -> State:
  """State before the first token, with the cache that `start` made."""
  prompt, length = prompt or default_prompt(keys)
  return State(
    sequences=begin(prompt, length, limits, _ROOM),
    cache=cache,
    keys=keys,
    target_calls=jnp.zeros_like(length),
  )


def step(
  model: LanguageModel,
  sampling: Sampling,
  limits: Limits,
  params: Any,
  state: State,
) -> State:
  """Decodes one token of every running row."""
  sequences = state.sequences
  hidden, cache = model.extend(
    params, state.cache, sequences.last_token[:, None], sequences.position
  )
  logits = model.logits(params, hidden[:, 0])
  sampling = sampling.within(model.vocab_size)
  if sampling.greedy:
    token = sampling_lib.argmax(sampling_lib.restrict(logits, sampling))
  else:
    # The same numbers as the extra token of a block without guesses.
    keys = randomness.block_keys(
      state.keys, sequences.length, state.target_calls
    )
    uniforms = randomness.uniforms(
      randomness.with_role(keys, randomness.EXTRA), 2
    )
    weights = jnp.exp(sampling_lib.log_weights(logits, sampling))
    token = sampling_lib.draw(weights, uniforms)
  count = sequences.running.astype(jnp.int32)
  return state.replace(
    sequences=sequences.append(
      token[:, None],
      sampling_lib.token_log_probs(logits, token)[:, None],
      count,
      limits.eos_id,
    ),
    cache=cache,
    target_calls=state.target_calls + count,
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def decode_from(
  model: LanguageModel,
  sampling: Sampling,
  limits: Limits,
  params: Any,
  cache: Any,
  keys: Array,
  prompt: tuple[Array, Array] | None = None,
) -> Result:
  """`decode` with the cache that `start` made: a program of the loop alone."""
  state = lax.while_loop(
    lambda state: jnp.any(state.sequences.running),
    functools.partial(step, model, sampling, limits, params),
    init(limits, cache, keys, prompt),
  )
  return Result(
    **new_tokens(state.sequences, limits), target_calls=state.target_calls
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def decode(
  model: LanguageModel,
  sampling: Sampling,
  limits: Limits,
  params: Any,
  inputs: Any,
  keys: Array,
  prompt: tuple[Array, Array] | None = None,
) -> Result:
  """Decodes a batch, one token per call of the model.

  Args:
    model: static; build it once, a new one compiles anew.
    sampling: how tokens are chosen.
    limits: when rows end.
    params: as `model.prepare` returns them.
    inputs: what `model.start` takes, batch axis first.
    keys: from `randomness.row_keys`.
    prompt: (tokens [B, P], lengths [B]) to go on from; default one id 0.
  """
  cache = start(model, limits, params, inputs, prompt)
  return decode_from(model, sampling, limits, params, cache, keys, prompt)
