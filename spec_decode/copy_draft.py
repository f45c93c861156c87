# SPDX-License-Identifier: Apache-2.0
"""Guesses copied from the context (section 3.6): no model, c = 0.

Shape letters: B rows, I input length, S buffer length, N shared tokens at
most, G guesses (gamma).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spec_decode import drafts
from spec_decode import sampling as sampling_lib
from spec_decode.language_model import Proposal

Array = jax.Array

# Where no token stands. Unlike `ngram.NONE`, so that the two never match.
_EMPTY = -2


@dataclasses.dataclass(frozen=True)
class CopyDraft:
  """Copies what followed the last tokens where they occurred before.

  Looks in the encoder's inputs, ids [B, I] padded with 0, and in the row's own
  text. The occurrence that shares the longest ending with the text wins, of
  equals the most recent, text after inputs. A copy from the inputs stops where
  they end. One from the text that catches up with the last token goes on with
  its own guesses, as text that repeats itself does. Without an occurrence
  there is no guess, and the block is a plain step.

  Has no parameters: give None.

  Attributes:
    vocab_size: number of real ids.
    gamma: guesses per block.
    shortest: the ending that must be shared for a guess, in tokens.
    longest: N; longer shared endings count as this.
  """

  vocab_size: int
  gamma: int
  shortest: int = 1
  longest: int = 3

  def __post_init__(self):
    if not 1 <= self.shortest <= self.longest:
      raise ValueError(
        'Expected 1 <= shortest <= longest, got shortest ='
        f' {self.shortest}, longest = {self.longest}.'
      )

  def prepare(self, params: Any = None) -> Any:
    return params

  def start(self, params, inputs, prompt: Array, capacity: int) -> Array:
    """The inputs, `_EMPTY` for 0 and at the end: [B, I + 1].

    Raises:
      ValueError: the inputs are not ids [B, I].
    """
    del params, prompt, capacity
    leaves = jax.tree.leaves(inputs)
    if [(x.ndim, x.dtype.kind in 'iu') for x in leaves] != [(2, True)]:
      raise ValueError(
        'Expected inputs to be token ids [batch, length], got'
        f' {[(x.shape, x.dtype.name) for x in leaves]}. CopyDraft copies from'
        ' them.'
      )
    inputs = jnp.where(leaves[0] == 0, _EMPTY, leaves[0]).astype(jnp.int32)
    return jnp.pad(inputs, ((0, 0), (0, 1)), constant_values=_EMPTY)

  def propose(
    self, params, cache, tokens, length, keys, target_hidden, size
  ) -> Proposal:
    """The guesses follow from the past alone: each had probability 1."""
    del params, keys, target_hidden
    written = jnp.arange(tokens.shape[1]) < length[:, None]
    text = jnp.where(written, tokens, _EMPTY)
    ending = drafts.last_tokens(tokens, length, self.longest)
    shared = jnp.concatenate(
      [_shared(cache, ending), _shared(text, ending)], axis=1
    )  # [B, I + 1 + S]
    place = jnp.arange(shared.shape[1])
    best = sampling_lib.argmax(shared * shared.shape[1] + place)
    most = jnp.take_along_axis(shared, best[:, None], axis=1)
    guesses = _continue(cache, text, best + 1, length, self.gamma)
    real = (guesses >= 0) & (guesses < min(size, self.vocab_size))
    drawn = jnp.cumprod(real & (most >= self.shortest), axis=1)
    return Proposal(
      tokens=jnp.where(drawn > 0, guesses, 0),
      count=jnp.sum(drawn, axis=1, dtype=jnp.int32),
      q=None,
      cache=cache,
    )


def _shared(text: Array, ending: Array) -> Array:
  """How many last tokens of `ending` [B, N] end at each place of text [B, L].

  0 where nothing follows: there is nothing to copy.
  """
  size, longest = text.shape[1], ending.shape[1]
  before = jnp.pad(text, ((0, 0), (longest, 1)), constant_values=_EMPTY)
  equal = before[:, longest + 1 :] != _EMPTY
  total = jnp.zeros(text.shape, jnp.int32)
  for back in range(longest):
    shifted = before[:, longest - back : longest - back + size]
    equal &= shifted == ending[:, longest - 1 - back, None]
    total += equal
  return total


def _continue(
  inputs: Array, text: Array, start: Array, length: Array, count: int
) -> Array:
  """`count` tokens from start[b] on, a place in inputs and text in one row.

  Returns:
    int32 [B, count], `_EMPTY` beyond the end of the inputs.
  """
  take = lambda x, index: jnp.take_along_axis(x, index, axis=1, mode='clip')
  offset = jnp.arange(count)
  copied = take(inputs, start[:, None] + offset)
  # From the text: its last `period` tokens, over and over.
  place = start - inputs.shape[1]
  period = jnp.maximum(length - place, 1)
  repeated = take(text, place[:, None] + offset % period[:, None])
  return jnp.where((place < 0)[:, None], copied, repeated)
