# SPDX-License-Identifier: Apache-2.0
"""What the parts of one iteration cost, in the loop they belong to.

Each part runs in a compiled loop of its own, so no dispatch is timed; medians
of interleaved repeats after a warm-up. The draft is timed as the difference
that its calls make between target calls: in between the target pushes the
draft's weights out of the processor's cache, so alone it looks cheaper.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_decode import autoregressive
from spec_decode import randomness
from spec_decode import sampling as sampling_lib
from spec_decode import speculative
from spec_decode.drafts import UniformDraft
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds of the parts of decoding, per call."""

  plain_step: float  # one token without speculation: T(1) and its sampling
  wide: dict[int, float]  # target call of width gamma + 1, by gamma
  draft_in_loop: float  # all gamma guesses, between target calls
  draft_error: float  # standard error of draft_in_loop
  draft_alone: float  # the same, with nothing between
  draft_and_target: float  # both calls of an iteration
  iteration: float  # one whole step of the speculative loop
  gamma: int

  @property
  def c(self) -> float:
    """Cost of one guess over that of one plain step, in the loop."""
    return self.draft_in_loop / self.gamma / self.plain_step

  @property
  def c_error(self) -> float:
    return self.draft_error / self.gamma / self.plain_step

  @property
  def c_alone(self) -> float:
    return self.draft_alone / self.gamma / self.plain_step

  @property
  def wide_ratios(self) -> dict[int, float]:
    """T(gamma + 1) / T(1), by gamma."""
    return {g: wide / self.plain_step for g, wide in sorted(self.wide.items())}

  @property
  def overhead(self) -> float:
    """An iteration over its draft calls and its target call."""
    return self.iteration / self.draft_and_target


def _timed(function, *args) -> float:
  began = time.perf_counter()
  jax.block_until_ready(function(*args))
  return time.perf_counter() - began


def rounds(
  functions: Mapping[Any, Callable[[], Any]], repeats: int
) -> dict[Any, np.ndarray]:
  """Seconds [repeats] of each thunk, taking turns, after one warm-up each."""
  for function in functions.values():
    jax.block_until_ready(function())
  times = {name: [] for name in functions}
  for _ in range(repeats):
    for name, function in functions.items():
      times[name].append(_timed(function))
  return {name: np.array(values) for name, values in times.items()}


def medians(
  functions: Mapping[Any, Callable[[], Any]], repeats: int
) -> dict[Any, float]:
  """Median seconds of each thunk, see `rounds`."""
  times = rounds(functions, repeats)
  return {name: float(np.median(values)) for name, values in times.items()}


def _rewound(state: speculative.State, steps):
  """The same state, so that loops of any length do the same work."""
  sequences = state.sequences
  # Nothing ends: the cap moves out of reach and no token counts as EOS.
  return state.replace(
    sequences=sequences.replace(
      stop=jnp.zeros_like(sequences.stop),
      limit=jnp.full_like(sequences.limit, sequences.tokens.shape[1]),
      length=jnp.minimum(sequences.length, steps),
    )
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def loop(
  config: Speculation, part: str, calls: int, params, draft_params, state
) -> Any:
  """Runs one part of an iteration `calls` times over, as the loop would.

  Args:
    config: what to time; its EOS must be -1.
    part: 'plain_step', 'draft', 'target', 'draft_and_target' or 'iteration'.
    calls: how often.
    params: of the target.
    draft_params: of the draft.
    state: where to start; rows keep near that length.
  """
  start = state.sequences.length
  rows = jnp.arange(start.shape[0])

  def draft(state):
    keys = randomness.block_keys(
      state.keys, state.sequences.length, state.target_calls
    )
    size = config.sampling.vocab_size or speculative.target_width(
      config.target, params, state
    )
    proposal = config.draft.propose(
      draft_params, state.draft_cache, state.sequences.tokens,
      state.sequences.length, keys, state.hidden, size,
    )  # fmt: skip
    return state.replace(draft_cache=proposal.cache), proposal

  def target(state, guesses):
    chunk = jnp.concatenate(
      [state.sequences.last_token[:, None], guesses], axis=1
    )
    hidden, cache = config.target.extend(
      params, state.target_cache, chunk, state.sequences.position
    )
    best = sampling_lib.argmax(config.target.logits(params, hidden))
    return state.replace(target_cache=cache), best

  def remember(state, tokens, q=None):
    """Makes the next call depend on this one's result."""
    used = jnp.zeros((), jnp.int32)
    if q is not None:
      used = (jnp.sum(q[:, :, 0]) < 0).astype(jnp.int32)
    sequences = state.sequences
    written = sequences.tokens.at[rows, sequences.length - 1].set(
      tokens[:, -1] + used
    )
    length = jnp.where(
      sequences.length < start + 8, sequences.length + 1, start
    )
    return state.replace(
      sequences=sequences.replace(tokens=written, length=length),
      target_calls=state.target_calls + 1,
    )

  def body(_, state):
    empty = jnp.zeros((rows.shape[0], config.draft.gamma), jnp.int32)
    if part == 'plain_step':
      plain = autoregressive.State(
        state.sequences, state.target_cache, state.keys, state.target_calls
      )
      plain = autoregressive.step(
        config.target, config.sampling, config.limits, params, plain
      )
      state = state.replace(
        sequences=plain.sequences,
        target_cache=plain.cache,
        target_calls=plain.target_calls,
      )
      return _rewound(state, start + 8)
    if part == 'iteration':
      state, _ = speculative.step(config, params, draft_params, state)
      return _rewound(state, start + 8)
    if part == 'target':
      return remember(*target(state, empty))
    state, proposal = draft(state)
    if part == 'draft':
      return remember(state, proposal.tokens, proposal.q)
    state, best = target(state, proposal.tokens)
    return remember(state, best, proposal.q)

  # Cut off at the carried state: the result is small and all work is kept.
  state = lax.fori_loop(0, calls, body, _rewound(state, start))
  return state.sequences.tokens, state.target_calls


_ANY = Sampling()
_init = jax.jit(speculative.init, static_argnums=0)
PARTS = ('plain_step', 'target', 'draft', 'draft_and_target', 'iteration')


def thunks(
  config: Speculation,
  parts: Sequence[str],
  params: Any,
  draft_params: Any,
  inputs: Any,
  calls: int = 20,
  prefix: int = 16,
  prompt: tuple[Any, Any] | None = None,
  gammas: Iterable[int] = (),
) -> dict[str | int, Callable[[], Any]]:
  """What runs each of `parts` `calls` times, see `loop`.

  Rows have about `prefix` tokens after `prompt`, as in `speculative.decode`,
  and never end. For each of `gammas` there is the part 'target' at its width.
  """
  gamma, gammas = config.draft.gamma, tuple(gammas)
  # One size of cache for all.
  room = max(gamma, *gammas, 0) - gamma
  limits = dataclasses.replace(
    config.limits,
    eos_id=-1,
    max_new_tokens=max(config.limits.max_new_tokens, prefix + 16) + room,
  )
  config = dataclasses.replace(config, limits=limits)
  keys = randomness.row_keys(0, jnp.arange(inputs.shape[0]))

  # What the target does alone is one program for all drafts and samplings.
  def alone(gamma, sampling=_ANY):
    nobody = UniformDraft(config.target.vocab_size, gamma)
    return dataclasses.replace(config, draft=nobody, sampling=sampling)

  starter = alone(gamma), params, None
  if not {'plain_step', 'target'}.issuperset(parts):
    starter = config, params, draft_params
  caches = speculative.start(*starter, inputs, prompt)
  state = _init(alone(gamma), params, caches, keys, prompt)
  sequences = state.sequences
  state = state.replace(
    sequences=sequences.replace(length=sequences.length + prefix)
  )
  # Without what the draft has, so that its shapes do not matter.
  bare = state.replace(draft_cache=None)
  run_alone = lambda part, *args: functools.partial(
    loop, alone(*args), part, calls, params, None, bare
  )
  found = {other: run_alone('target', other) for other in gammas}
  for part in parts:
    if part == 'target':
      found[part] = run_alone(part, gamma)
    elif part == 'plain_step':
      found[part] = run_alone(part, gamma, config.sampling)
    else:
      found[part] = functools.partial(
        loop, config, part, calls, params, draft_params, state
      )
  return found


def costs(
  config: Speculation,
  *args,
  gammas: Iterable[int] = (),
  repeats: int = 5,
  calls: int = 20,
  **kwargs,
) -> Costs:
  """Measures `Costs`, all parts taking turns.

  Args:
    config: what to time, gamma at least 1.
    *args: as those of `thunks`.
    gammas: others of which the target's call is timed.
    repeats: of every timing.
    calls: per timing.
    **kwargs: as those of `thunks`.
  """
  own = config.draft.gamma
  others = set(gammas) - {own}
  timed = thunks(config, PARTS, *args, calls=calls, gammas=others, **kwargs)
  times = {part: t / calls for part, t in rounds(timed, repeats).items()}
  seconds = {part: float(np.median(t)) for part, t in times.items()}
  drafts = times['draft_and_target'] - times['target']
  error = float('nan')
  if repeats > 1:
    error = float(np.std(drafts, ddof=1) / np.sqrt(repeats))
  return Costs(
    plain_step=seconds['plain_step'],
    wide={own: seconds['target']} | {gamma: seconds[gamma] for gamma in others},
    # Less than nothing is noise.
    draft_in_loop=max(float(np.median(drafts)), 0.0),
    draft_error=error,
    draft_alone=seconds['draft'],
    draft_and_target=seconds['draft_and_target'],
    iteration=seconds['iteration'],
    gamma=own,
  )
