# SPDX-License-Identifier: Apache-2.0
"""Logits -> the distribution that is really sampled (section 2.2).

Argmax, temperature, top-k and nucleus sampling are all plain sampling from an
adjusted distribution, so everything after this module knows one case only.
All of it is float32, whatever the network computes in.

Shape letters: V ids of a distribution; leading axes are free.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How a next token is chosen from logits; hashable, hence static under jit.

  Applied in the order temperature, top-k, top-p. Equal probabilities keep the
  lowest ids.

  Attributes:
    temperature: 0 is argmax, as a distribution with all mass on one id.
    top_k: only the k most likely ids; 0 for all.
    top_p: only the most likely ids whose mass reaches this; 1 for all.
    vocab_size: ids at or beyond it are never drawn, since tables are padded
      beyond the real vocabulary. None for those of the target; 0 for the
      whole width of the target's logits.
    forbidden: ids that are never drawn; T5's padding id by default.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  vocab_size: int | None = None
  forbidden: tuple[int, ...] = (0,)

  def __post_init__(self):
    for name, good, expected in (
      ('temperature', self.temperature >= 0, 'a number >= 0'),
      ('top_k', self.top_k >= 0, 'an integer >= 0 (0 for all ids)'),
      ('top_p', 0 < self.top_p <= 1, 'a number in (0, 1] (1 for all ids)'),
      ('vocab_size', (self.vocab_size or 0) >= 0, 'None or an integer >= 0'),
    ):
      if not good:
        raise ValueError(
          f'Expected {name} to be {expected}, got {getattr(self, name)}.'
        )

  def within(self, vocab_size: int) -> 'Sampling':
    """The same, of a model with so many real ids unless it says otherwise."""
    if self.vocab_size is not None:
      return self
    return dataclasses.replace(self, vocab_size=vocab_size)

  @property
  def greedy(self) -> bool:
    return self.temperature == 0

  @property
  def filtered(self) -> bool:
    return self.top_k > 0 or self.top_p < 1


def restrict(logits: Array, sampling: Sampling) -> Array:
  """Logits [..., any] -> float32 [..., V]; ids that may not occur get -inf."""
  logits = logits.astype(jnp.float32)
  width, size = logits.shape[-1], sampling.vocab_size or logits.shape[-1]
  if size < width:
    logits = logits[..., :size]
  elif size > width:
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, size - width)]
    logits = jnp.pad(logits, missing, constant_values=-jnp.inf)
  for token in sampling.forbidden:
    if token < size:
      logits = logits.at[..., token].set(-jnp.inf)
  return logits


def log_weights(logits: Array, sampling: Sampling) -> Array:
  """Logits -> unnormalised log-probabilities [..., V], the largest being 0."""
  logits = restrict(logits, sampling)
  if sampling.greedy:
    best = argmax(logits)[..., None]
    return jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)
  # Subtracting first keeps tiny temperatures from overflowing.
  z = logits - jnp.max(logits, axis=-1, keepdims=True)
  z = z / sampling.temperature
  if 0 < sampling.top_k < z.shape[-1]:
    z = _most_likely(z, jnp.ones_like(z), sampling.top_k)
  if sampling.top_p < 1:
    weights = jnp.exp(z)
    needed = sampling.top_p * jnp.sum(weights, axis=-1, keepdims=True)
    z = _most_likely(z, weights, needed)
  return z


def distribution(logits: Array, sampling: Sampling) -> Array:
  """The probabilities [..., V] that `sampling` draws from."""
  z = log_weights(logits, sampling)
  weights = jnp.exp(z)
  return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _most_likely(z: Array, amounts: Array, needed: Array | float) -> Array:
  """Keeps the most likely ids whose amounts first add up to `needed`.

  The edge is found by bisecting over the bit patterns of -z, which order as
  the numbers do: exact, and far cheaper than a sort.

  Args:
    z: [..., V], the largest being 0.
    amounts: [..., V], of each id.
    needed: [..., 1] or a number, at most the sum of all amounts.
  """
  bits = lax.bitcast_convert_type(jnp.abs(z), jnp.int32)
  total = lambda chosen: jnp.sum(
    jnp.where(chosen, amounts, 0.0), axis=-1, keepdims=True
  )

  def halve(_, bounds):
    low, high = bounds  # total(bits <= low) < needed <= total(bits <= high)
    middle = low + (high - low) // 2
    enough = total(bits <= middle) >= needed
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

  last = lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)
  low = jnp.full((*z.shape[:-1], 1), -1, jnp.int32)
  _, edge = lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, last)))
  equal = bits == edge
  each = jnp.max(jnp.where(equal, amounts, 0.0), axis=-1, keepdims=True)
  missing = needed - total(bits < edge)
  ties = jnp.maximum(jnp.ceil(missing / each), 1)

  def lowest(_):
    return (bits < edge) | (equal & (jnp.cumsum(equal, axis=-1) <= ties))

  # Ranking ids is dear and ties at the edge are rare.
  many = jnp.sum(equal, axis=-1, keepdims=True) > ties
  keep = lax.cond(jnp.any(many), lowest, lambda _: bits <= edge, None)
  return jnp.where(keep, z, -jnp.inf)


def argmax(x: Array) -> Array:
  """Index of the largest entry of the last axis, the lowest of equals."""
  ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  # Two plain reductions: several times faster than jnp.argmax on a CPU.
  largest = jnp.max(x, axis=-1, keepdims=True)
  found = jnp.where(x == largest, ids, x.shape[-1] - 1)
  return jnp.min(found, axis=-1)


def draw(weights: Array, uniforms: Array) -> Array:
  """Draws ids with probability proportional to weights, which need no norm.

  Inverse CDF in two levels, first a block of ids and then an id: it reads the
  vocabulary once, where `jax.random.categorical` makes V Gumbel variates.

  Args:
    weights: [..., V], non-negative, at least one positive.
    uniforms: [..., 2] in [0, 1).

  Returns:
    int32 [...]; never an id of weight zero.
  """
  size = weights.shape[-1]
  block = 1 << max(1, (size - 1).bit_length() // 2)
  blocks = -(-size // block)
  missing = [(0, 0)] * (weights.ndim - 1) + [(0, blocks * block - size)]
  table = jnp.pad(weights, missing)
  table = table.reshape(*weights.shape[:-1], blocks, block)
  outer = _first_above(jnp.sum(table, axis=-1), uniforms[..., 0])
  chosen = jnp.take_along_axis(table, outer[..., None, None], axis=-2)
  inner = _first_above(chosen[..., 0, :], uniforms[..., 1])
  return (outer * block + inner).astype(jnp.int32)


def _first_above(weights: Array, uniform: Array) -> Array:
  """First index whose running sum exceeds uniform times the whole sum."""
  sums = jnp.cumsum(weights, axis=-1)
  # Scaling by the sum really made, not by 1, keeps the last entry reachable;
  # asking for a positive weight guards against the rounding of the sums.
  found = (sums > uniform[..., None] * sums[..., -1:]) & (weights > 0)
  last = weights.shape[-1] - 1 - jnp.argmax(weights[..., ::-1] > 0, axis=-1)
  return jnp.where(jnp.any(found, axis=-1), jnp.argmax(found, axis=-1), last)


def token_log_probs(logits: Array, tokens: Array) -> Array:
  """Log-probability of tokens [...] under the plain softmax of logits [..., V].

  Temperature 1 and no mask: what teacher-forced scoring gives.
  """
  logits = logits.astype(jnp.float32)
  chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
  return chosen - jax.nn.logsumexp(logits, axis=-1)
