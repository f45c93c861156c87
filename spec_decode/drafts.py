# SPDX-License-Identifier: Apache-2.0
"""What can guess (section 3.6): each with the exact q of its guesses.

`copy_draft.py` has the one that copies from the context.

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
from spec_decode.models import ngram
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
    uniforms = _uniforms(keys, self.gamma, self.sampling)
    draw = lambda hidden, uniforms: _draw(
      self.model.logits(params, hidden), self.sampling, uniforms, size
    )
    token, q = draw(hidden, uniforms[0])

    def guess(carry, uniform):
      cache, token, position = carry
      hidden, cache = self.model.extend(params, cache, token[:, None], position)
      token, q = draw(hidden[:, 0], uniform)
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


@dataclasses.dataclass(frozen=True)
class NGramDraft:
  """Draws from n-gram tables, each guess given the ones before it.

  The parameters are the tables of `models.ngram`: unigram, bigram or longer.

  Attributes:
    vocab_size: number of real ids, that of the tables.
    sampling: its own; temperature 0 guesses the most frequent successor.
    gamma: guesses per block.
  """

  vocab_size: int
  sampling: Sampling
  gamma: int

  def prepare(self, params: Any) -> Any:
    """The tables on the device.

    Raises:
      ValueError: the tables are of another vocabulary.
    """
    size = params['unigram'].shape[0]
    if size != self.vocab_size:
      raise ValueError(
        f'Expected tables of {self.vocab_size} ids, got {size}. Count them'
        ' with the vocabulary of the target.'
      )
    return jax.tree.map(jnp.asarray, params)

  def start(self, params, inputs, prompt: Array, capacity: int) -> Any:
    del params, inputs, prompt, capacity
    return ()  # the committed tokens say it all

  def propose(
    self, params, cache, tokens, length, keys, target_hidden, size
  ) -> Proposal:
    del target_hidden
    context = last_tokens(tokens, length, ngram.context_length(params))

    def guess(context, uniform):
      q = ngram.probabilities(params, context)
      token, q = _draw(jnp.log(q), self.sampling, uniform, size)
      longer = jnp.concatenate([context, token[:, None]], axis=1)
      return longer[:, 1:], (token, q)

    uniforms = _uniforms(keys, self.gamma, self.sampling)
    _, (guesses, q) = lax.scan(guess, context, uniforms)
    return Proposal(
      tokens=jnp.moveaxis(guesses, 0, 1),
      count=jnp.full_like(length, self.gamma),
      q=None if q is None else jnp.moveaxis(q, 0, 1),
      cache=cache,
    )


@dataclasses.dataclass(frozen=True)
class UniformDraft:
  """Guesses every allowed id with the same probability; has no parameters.

  Attributes:
    vocab_size: number of real ids.
    gamma: guesses per block.
    forbidden: ids that are never guessed; T5's padding id by default.
  """

  vocab_size: int
  gamma: int
  forbidden: tuple[int, ...] = (0,)

  def prepare(self, params: Any = None) -> Any:
    return params

  def start(self, params, inputs, prompt: Array, capacity: int) -> Any:
    del params, inputs, prompt, capacity
    return ()

  def propose(
    self, params, cache, tokens, length, keys, target_hidden, size
  ) -> Proposal:
    del params, tokens, target_hidden
    sampling = Sampling(vocab_size=size, forbidden=self.forbidden)
    q = sampling_lib.distribution(jnp.zeros(self.vocab_size), sampling)
    # One table for all: copies of it would be summed anew for each guess.
    draw = jax.vmap(jax.vmap(sampling_lib.draw, (None, 0)), (None, 0))
    guesses = draw(q, randomness.uniforms(keys, self.gamma, 2))
    return Proposal(
      tokens=guesses,
      count=jnp.full_like(length, self.gamma),
      q=jnp.broadcast_to(q, (*guesses.shape, size)),
      cache=cache,
    )


def last_tokens(tokens: Array, length: Array, count: int) -> Array:
  """The last `count` of the first length[b] tokens of each row.

  Args:
    tokens: int32 [B, S].
    length: int32 [B]; what PARKED rows get is junk.
    count: static.

  Returns:
    int32 [B, count], the newest last; `ngram.NONE` where a row is shorter.
  """
  index = length[:, None] + jnp.arange(-count, 0)
  rows = jnp.arange(tokens.shape[0])[:, None]
  taken = tokens.at[rows, jnp.maximum(index, 0)].get(mode='clip')
  return jnp.where(index < 0, ngram.NONE, taken)


def _uniforms(keys: Array, gamma: int, sampling: Sampling) -> Array:
  """Random numbers of the guesses, [G, B, 2]; greedy drafts need none."""
  if sampling.greedy:
    return jnp.zeros((gamma, keys.shape[0], 2))
  return jnp.swapaxes(randomness.uniforms(keys, gamma, 2), 0, 1)


def _draw(logits: Array, sampling: Sampling, uniforms: Array, size: int):
  """Ids [...] and what they were drawn from, [..., V] or None if certain."""
  sampling = dataclasses.replace(sampling, vocab_size=size)
  if sampling.greedy:
    restricted = sampling_lib.restrict(logits, sampling)
    return sampling_lib.argmax(restricted), None
  q = sampling_lib.distribution(logits, sampling)
  return sampling_lib.draw(q, uniforms), q
