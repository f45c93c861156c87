# SPDX-License-Identifier: Apache-2.0
"""What the decoding loops ask of a model and of a draft.

Both are a few pure functions; parameters are always arguments, caches are
opaque. Shape letters: B rows, S buffer length, W chunk width, G guesses
(gamma), E hidden size, V ids.
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import Protocol

from flax import struct
import jax

Array = jax.Array
Params = Any
Cache = Any
Inputs = Any

# Position of a row that has ended: its writes fall outside every buffer.
PARKED = 1 << 30


@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """A model as functions of its parameters; hashable, hence static under jit.

  Attributes:
    start: (params, inputs, capacity) -> cache. Does once what depends on the
      inputs only, and makes room for `capacity` tokens per row.
    extend: (params, cache, tokens [B, W], position [B]) -> (hidden [B, W, E],
      cache). Feeds a chunk at positions position[b] + 0..W-1 and forgets what
      the row's cache held at or after position[b]: rolling back is passing a
      smaller position. Entries at or beyond the capacity are dropped.
    logits: (params, hidden [..., E]) -> [..., at least V]; called on the rows
      that are read only.
    vocab_size: number of real ids; logits may be wider.
    prepare: params at rest -> params as the functions above take them. To be
      called once, outside any loop.
  """

  start: Callable[[Params, Inputs, int], Cache]
  extend: Callable[[Params, Cache, Array, Array], tuple[Array, Cache]]
  logits: Callable[[Params, Array], Array]
  vocab_size: int
  prepare: Callable[[Params], Params] = lambda params: params


@struct.dataclass
class Proposal:
  """Guesses for one block."""

  tokens: Array  # int32 [B, G]
  count: Array  # int32 [B], how many of them were drawn, 0..G
  q: Array | None  # [B, G, V], what each was drawn from; None: it was certain
  cache: Cache


class Draft(Protocol):
  """What proposes guesses. Implementations are frozen dataclasses.

  Attributes:
    gamma: number of guesses per block at most.
    vocab_size: number of real ids.
  """

  gamma: int
  vocab_size: int

  def start(
    self, params: Params, inputs: Inputs, prompt: Array, capacity: int
  ) -> Cache:
    """Cache after the inputs and the decoder prompt [B, P]."""
    ...

  def propose(
    self,
    params: Params,
    cache: Cache,
    tokens: Array,
    length: Array,
    keys: Array,
    target_hidden: Array,
    size: int,
  ) -> Proposal:
    """Guesses what follows the first length[b] tokens of each row.

    Whether a guess is drawn may depend on what came before it, never on the
    guess itself: dropping a drawn guess changes the output distribution.

    Args:
      params: the draft's own.
      cache: as `start` or the last call left it. It may hold entries of
        guesses that were rejected since, and lack the last one accepted.
      tokens: int32 [B, S], the committed tokens; junk from length[b] on.
      length: int32 [B]; PARKED for rows that have ended.
      keys: one per row, for this block's guesses only.
      target_hidden: [B, E], the target's hidden state that the last committed
        token came from; zeros before the first call.
      size: V, the width of the target's distribution.
    """
    ...

  def prepare(self, params: Params) -> Params:
    """As `LanguageModel.prepare`."""
    ...
