# SPDX-License-Identifier: Apache-2.0
"""Speculative sampling: which guesses stand, and the token after them.

Algorithm 1, lines 3 to 5 (section 2.3), with lenience (appendix A.5).

p    target's distribution after its own standardization
q    the distribution a guess was really drawn from
l    lenience; 1 is exact

Shape letters: B rows, G guesses of a block (gamma), V ids.
"""

import dataclasses

import jax
import jax.numpy as jnp

from spec_decode import sampling as sampling_lib
from spec_decode.sampling import Sampling

Array = jax.Array


def verify(
  logits: Array,
  guesses: Array,
  count: Array,
  q: Array | None,
  test_uniforms: Array,
  extra_uniforms: Array,
  sampling: Sampling,
  lenience: float = 1.0,
) -> tuple[Array, Array]:
  """Tests a block of guesses and draws the token that follows them.

  Args:
    logits: the target's, [B, G + 1, >= V]: row i scores what follows i guesses.
    guesses: int32 [B, G].
    count: int32 [B]: how many of them were drawn; the rest are ignored.
    q: [B, G, V], or None where each guess had probability 1 when it was made.
    test_uniforms: r of Algorithm 1, [B, G].
    extra_uniforms: [B, 2], for the extra token.
    sampling: the target's standardization.
    lenience: l in (0, 1].

  Returns:
    accepted: int32 [B], the length of the leading run of accepted guesses.
    extra: int32 [B], the token after them, from norm(max(0, p - l q)) after a
      rejection and from p otherwise.
  """
  if sampling.greedy:
    z = sampling_lib.restrict(logits, sampling)
    best = sampling_lib.argmax(z)  # [B, G + 1]
    agrees = _close_to_best(z, best, guesses, lenience)
    accepted = _leading(agrees, count)
    return accepted, _at(best, accepted)
  z = sampling_lib.log_weights(logits, sampling)
  log_sum = jax.nn.logsumexp(z, axis=-1)  # [B, G + 1]
  p_guess = jnp.exp(_pick(z[:, :-1], guesses) - log_sum[:, :-1])
  q_guess = 1.0 if q is None else _pick(q, guesses)
  # r > p / q rejects; as a product it needs no division by q, and the strict
  # comparison rejects an impossible token even where r is exactly 0.
  passes = test_uniforms * (lenience * q_guess) < p_guess
  accepted = _leading(passes, count)
  if guesses.shape[1] == 0:
    # The weights that plain decoding draws from, to the bit.
    weights = jnp.exp(_at(z, accepted))
    return accepted, sampling_lib.draw(weights, extra_uniforms)
  p = jnp.exp(_at(z, accepted) - _at(log_sum, accepted)[:, None])
  rejected = (accepted < count)[:, None]
  index = jnp.minimum(accepted, guesses.shape[1] - 1)
  q_row = (
    jax.nn.one_hot(_at(guesses, index), p.shape[-1])
    if q is None
    else _at(q, index)
  )
  weights = jnp.maximum(p - jnp.where(rejected, lenience * q_row, 0.0), 0.0)
  # p = q up to rounding can leave nothing over: then p is the right law.
  empty = jnp.sum(weights, axis=-1, keepdims=True) <= 0
  weights = jnp.where(empty, p, weights)
  return accepted, sampling_lib.draw(weights, extra_uniforms)


@dataclasses.dataclass(frozen=True)
class Replayed:
  """Stands in for `verify`: each guess passes with a probability given.

  A simulation. With random weights at true shapes it costs what the real pair
  costs, at the acceptance that was published for it; the text means nothing.

  Attributes:
    alpha: the probability, in [0, 1].
  """

  alpha: float

  def __post_init__(self):
    if not 0 <= self.alpha <= 1:
      raise ValueError(f'Expected alpha in [0, 1], got {self.alpha}.')

  def __call__(
    self, logits, guesses, count, q, test_uniforms, *args
  ) -> tuple[Array, Array]:
    # The real verdict decides the extra token, so none of its work is saved.
    _, extra = verify(logits, guesses, count, q, test_uniforms, *args)
    return _leading(test_uniforms < self.alpha, count), extra


def acceptance_probability(
  logits: Array,
  guesses: Array,
  q: Array | None,
  sampling: Sampling,
  lenience: float = 1.0,
) -> Array:
  """beta = sum_x min(p(x) / l, q(x)) at each guess: [B, G].

  For argmax targets with l < 1 it is the draft's mass on the ids that
  `verify` would accept.

  Args:
    logits: the target's at the guessed positions, [B, G, >= V].
    guesses: int32 [B, G], read only where q is None.
    q: [B, G, V], or None for one-hot.
    sampling: the target's standardization.
    lenience: l in (0, 1].
  """
  if sampling.greedy:
    z = sampling_lib.restrict(logits, sampling)
    best = sampling_lib.argmax(z)
    ids = jnp.arange(z.shape[-1])
    limit = jnp.minimum(_accepted_by(z, best, ids, lenience), 1.0)
  else:
    limit = sampling_lib.distribution(logits, sampling) / lenience
  if q is None:
    return jnp.minimum(_pick(limit, guesses), 1.0)
  return jnp.sum(jnp.minimum(limit, q), axis=-1)


def _accepted_by(z: Array, best: Array, ids: Array, lenience: float) -> Array:
  """1.0 for each id of the vocabulary that argmax decoding accepts."""
  if lenience == 1:
    return (ids == best[..., None]).astype(jnp.float32)
  top = jnp.take_along_axis(z, best[..., None], axis=-1)
  return (z - top >= jnp.log(lenience)).astype(jnp.float32)


def _close_to_best(z, best, guesses, lenience):
  """p(x) >= l max(p) for each guess, with p the plain softmax: [B, G]."""
  if lenience == 1:
    return guesses == best[:, :-1]
  gap = _pick(z[:, :-1], guesses) - _pick(z[:, :-1], best[:, :-1])
  return gap >= jnp.log(lenience)


def _leading(passes: Array, count: Array) -> Array:
  """Length of the leading run of True among the first count[b] entries."""
  drawn = jnp.arange(passes.shape[1]) < count[:, None]
  return jnp.sum(jnp.cumprod(passes & drawn, axis=1), axis=1, dtype=jnp.int32)


def _pick(x: Array, ids: Array) -> Array:
  """x[b, i, ids[b, i]]: [B, G]."""
  return jnp.take_along_axis(x, ids[..., None], axis=-1)[..., 0]


def _at(x: Array, index: Array) -> Array:
  """x[b, index[b]]."""
  return x[jnp.arange(x.shape[0]), index]
