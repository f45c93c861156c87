# SPDX-License-Identifier: Apache-2.0
"""What can guess (section 3.6): each with the exact q of its guesses.

Shape letters: B rows, S buffer length, G guesses (gamma), V ids.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from spec_decode import autoregressive
from spec_decode import randomness
from spec_decode import sampling as sampling_lib
from spec_decode.language_model import LanguageModel
from spec_decode.language_model import Proposal
from spec_decode.sampling import Sampling

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ModelDraft:
  """A smaller model that decodes gamma tokens one after another.

  Attributes:
    model: the smaller model.
    sampling: its own; it need not be the target's.
    gamma: guesses per block.
  """

  model: LanguageModel
  sampling: Sampling
  gamma: int

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  def prepare(self, params: Any) -> Any:
    return self.model.prepare(params)

  def start(self, params, inputs, prompt: Array, capacity: int) -> Any:
    return autoregressive.prefill(self.model, params, inputs, prompt, capacity)

  def propose(
    self, params, cache, tokens, length, keys, target_hidden, size
  ) -> Proposal:
    del target_hidden
    rows = jnp.arange(length.shape[0])
    if self.gamma == 0:
      empty = jnp.zeros((length.shape[0], 0), jnp.int32)
      return Proposal(empty, jnp.zeros_like(length), None, cache)
    # After a fully accepted block the cache lacks its last guess, so the last
    # two tokens are fed: the first fills that hole, or changes nothing.
    start = jnp.maximum(length - 2, 0)
    index = start[:, None] + jnp.arange(2)
    pair = tokens.at[rows[:, None], index].get(mode='clip')
    hidden, cache = self.model.extend(params, cache, pair, start)
    hidden = hidden[rows, length - 1 - start]
    uniforms = (
      jnp.zeros((self.gamma, length.shape[0], 2))
      if self.sampling.greedy
      else jnp.swapaxes(randomness.uniforms(keys, self.gamma, 2), 0, 1)
    )
    token, q = self._draw(params, hidden, uniforms[0], size)

    def guess(carry, uniform):
      cache, token, position = carry
      hidden, cache = self.model.extend(params, cache, token[:, None], position)
      token, q = self._draw(params, hidden[:, 0], uniform, size)
      return (cache, token, position + 1), (token, q)

    (cache, _, _), (later, later_q) = lax.scan(
      guess, (cache, token, length), uniforms[1:]
    )
    stack = lambda x, xs: jnp.moveaxis(jnp.concatenate([x[None], xs]), 0, 1)
    return Proposal(
      tokens=stack(token, later),
      count=jnp.full_like(length, self.gamma),
      q=None if q is None else stack(q, later_q),
      cache=cache,
    )

  def _draw(self, params, hidden, uniforms, size):
    """A token [B] and what it was drawn from, [B, V] or None if certain."""
    logits = self.model.logits(params, hidden)
    sampling = dataclasses.replace(self.sampling, vocab_size=size)
    if sampling.greedy:
      restricted = sampling_lib.restrict(logits, sampling)
      return sampling_lib.argmax(restricted), None
    q = sampling_lib.distribution(logits, sampling)
    return sampling_lib.draw(q, uniforms), q
