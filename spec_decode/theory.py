# SPDX-License-Identifier: Apache-2.0
"""What speculative decoding should gain: section 3 of the paper as functions.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via
Speculative Decoding", ICML 2023 (arXiv 2211.17192).

    beta    probability that one guess at one prefix is accepted
    alpha   mean of beta over prefixes
    gamma   guesses per iteration
    c       time of one draft run / time of one target run
    c_hat   arithmetic operations per token, draft / target

These are numbers for the host: NumPy float64 in and out, not for use under
`jax.jit`. Arguments broadcast against each other; scalars give a scalar.
Whatever takes alpha assumes, as the paper does, that guesses are accepted
independently with that same probability. Three measures are easily confused:
alpha, accepted / drafted guesses, and tokens per target call. At alpha 0.7 and
gamma 5 they are 0.70, 0.39 and 2.94.
"""

import numpy as np
from numpy.typing import ArrayLike
from numpy.typing import NDArray

Float = NDArray[np.float64] | np.float64
Int = NDArray[np.int64] | np.int64

# Loose enough for distributions that were stored in bfloat16, tight enough to
# catch logits or counts.
_SUM_TOLERANCE = 1e-2


def divergence(p: ArrayLike, q: ArrayLike) -> Float:
  """D_LK(p, q) = 1 - sum_x min(p(x), q(x)), Definition 3.2 and Lemma 3.3.

  This is the total variation distance: symmetric, in [0, 1], 0 only when
  p = q, 1 only when p and q share no token.

  Args:
    p: the target's distribution(s), [..., vocab].
    q: the draft's distribution(s), [..., vocab]; leading axes broadcast.

  Returns:
    The divergence, [...].

  Raises:
    ValueError: p or q is not a distribution, or their vocabularies differ.
  """
  p, q = _distributions(p, q)
  # Half the L1 distance is the same number, without the cancellation that
  # leaves 1 - sum min slightly off 0 for equal distributions.
  return np.minimum(0.5 * np.abs(p - q).sum(axis=-1), 1.0)


def beta(p: ArrayLike, q: ArrayLike, lenience: ArrayLike = 1.0) -> Float:
  """sum_x min(p(x) / l, q(x)), Theorem 3.5 and, for l < 1, appendix A.5.

  The probability that a guess drawn from q passes the accept test against p.
  At lenience 1 it is 1 - D_LK(p, q). At temperature 0 the one-hot p and q are
  right for lenience 1 only: a lenient argmax compares the plain softmax with
  its own maximum, which is another rule.

  Args:
    p: the target's distribution(s), [..., vocab].
    q: the draft's distribution(s), [..., vocab]; leading axes broadcast.
    lenience: l in (0, 1], scalar or broadcasting with the leading axes.

  Returns:
    The acceptance probability, [...].

  Raises:
    ValueError: p or q is not a distribution, their vocabularies differ, or
      lenience is outside (0, 1].
  """
  p, q = _distributions(p, q)
  lenience = np.asarray(lenience, np.float64)
  valid = (lenience > 0) & (lenience <= 1)
  remedy = 'use 1 for exact sampling, less to accept more guesses'
  _require(valid, lenience, 'lenience must be in (0, 1]', remedy)
  accepted = np.minimum(p / lenience[..., None], q).sum(axis=-1)
  return np.minimum(accepted, 1.0)


def rejection_sampling_rate(p: ArrayLike, q: ArrayLike) -> Float:
  """sum_x p(x) min_x' q(x') / p(x'), appendix A.2.

  How often one-shot rejection sampling would accept a draft token: draw x
  from q, accept with probability p(x) / (M q(x)) where M = max_x p(x) / q(x).
  Never above beta(p, q), which is why the paper does not use it.

  Args:
    p: the target's distribution(s), [..., vocab].
    q: the draft's distribution(s), [..., vocab]; leading axes broadcast.

  Returns:
    The acceptance rate, [...]; 0 where q misses a token that p can emit.

  Raises:
    ValueError: p or q is not a distribution, or their vocabularies differ.
  """
  p, q = np.broadcast_arrays(*_distributions(p, q))
  # Tokens that the target never emits put no limit on M.
  ratio = np.divide(q, p, out=np.full(p.shape, np.inf), where=p > 0)
  return np.minimum(p.sum(axis=-1) * ratio.min(axis=-1), 1.0)


def tokens_per_call(alpha: ArrayLike, gamma: ArrayLike) -> Float:
  """(1 - alpha^(gamma+1)) / (1 - alpha), equation (1) of section 3.1.

  Expected new tokens of one iteration, which is one call of the target.

  Args:
    alpha: acceptance probability in [0, 1].
    gamma: guesses per iteration, a whole number >= 0.

  Returns:
    Tokens per call, in the broadcast shape; gamma + 1 at alpha = 1.

  Raises:
    ValueError: an argument is outside the range above.
  """
  alpha, gamma = _alpha(alpha), _whole('gamma', gamma)
  every = (alpha == 1) | (gamma == 0)
  # Any value but 1 will do where all gamma + 1 tokens are certain.
  alpha = np.where(every, 0.0, alpha)
  with np.errstate(divide='ignore'):
    # expm1 keeps the digits that 1 - alpha^(gamma+1) loses near alpha = 1.
    tokens = -np.expm1((gamma + 1) * np.log(alpha)) / (1 - alpha)
  return np.where(every, gamma + 1.0, tokens)[()]


def alpha_of_tokens_per_call(tokens: ArrayLike, gamma: ArrayLike) -> Float:
  """The alpha at which `tokens_per_call` is what was seen.

  Guesses are not independent of each other, so it is not the paper's alpha: it
  stands for it where one gamma is to be compared with others.

  Args:
    tokens: per call of the target, in [1, gamma + 1].
    gamma: guesses per iteration, a whole number >= 1.

  Returns:
    alpha in [0, 1], in the broadcast shape.

  Raises:
    ValueError: an argument is outside the range above.
  """
  gamma = _whole('gamma', gamma, 1)
  tokens, gamma = np.broadcast_arrays(np.asarray(tokens, float), gamma)
  valid = (tokens >= 1) & (tokens <= gamma + 1)
  remedy = 'pass tokens over target calls'
  _require(valid, tokens, 'tokens must be in [1, gamma + 1]', remedy)
  low, high = np.zeros(tokens.shape), np.ones(tokens.shape)
  for _ in range(60):  # halvings, to the last bit
    middle = (low + high) / 2
    below = tokens_per_call(middle, gamma) < tokens
    low, high = np.where(below, middle, low), np.where(below, high, middle)
  return high[()]


def oracle_tokens_per_call(alpha: ArrayLike) -> Float:
  """1 / (1 - alpha), section 3.5.

  Expected tokens per target call if gamma were always the number of guesses
  about to be accepted. It is the limit of `tokens_per_call` for large gamma and
  the largest speed-up that a draft of no cost can give.

  Args:
    alpha: acceptance probability in [0, 1].

  Returns:
    Tokens per call, in the shape of alpha; inf at alpha = 1.

  Raises:
    ValueError: an argument is outside the range above.
  """
  with np.errstate(divide='ignore'):
    return np.float64(1) / (1 - _alpha(alpha))


def tokens_with_cutoff(
  alpha: ArrayLike, gamma: ArrayLike, length: ArrayLike
) -> Float:
  """Expected tokens per call for outputs cut off at `length` tokens.

  This is length / E[target calls], where `tokens_per_call` is its limit mu for
  long outputs: at most mu and at least mu * length / (length + gamma). Guesses
  beyond the cap are neither drawn nor tested, and a guess accepted at the cap
  ends the output without an extra token, so the last iteration yields less
  than the others: hold benchmarks with short outputs against this value.

  An iteration of an endless output starts at token t with probability u_t:

    u_0 = 1,  u_t = sum_{j=1}^{gamma} (1 - alpha) alpha^(j-1) u_{t-j}
                    + alpha^gamma u_{t-gamma-1}

  and E[calls] = u_0 + ... + u_{length-1}, since the cap changes how many
  tokens the last iteration gives but not where iterations start.

  Args:
    alpha: acceptance probability in [0, 1].
    gamma: guesses per iteration, a whole number >= 0.
    length: tokens per output, a whole number >= 1.

  Returns:
    Tokens per call, in the broadcast shape.

  Raises:
    ValueError: an argument is outside the range above.
  """
  alpha, gamma = _alpha(alpha), _whole('gamma', gamma)
  length = _whole('length', length, least=1)
  alpha, gamma, length = np.broadcast_arrays(alpha, gamma, length)
  if not length.size:
    return np.zeros(length.shape)
  a, g = alpha[..., None], gamma[..., None]
  total = int(length.max())
  # accepted[..., n] is the probability that exactly n guesses are accepted.
  n = np.arange(min(int(gamma.max()) + 1, total))
  accepted = np.where(n < g, (1 - a) * a**n, np.where(n == g, a**n, 0.0))
  starts = np.zeros((*length.shape, total))
  starts[..., 0] = 1
  for t in range(1, total):
    reach = min(t, n.size)
    before = starts[..., t - reach : t][..., ::-1]
    starts[..., t] = (accepted[..., :reach] * before).sum(axis=-1)
  calls = np.where(np.arange(total) < length[..., None], starts, 0).sum(axis=-1)
  return length / calls


def speedup(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike) -> Float:
  """(1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + 1)), Theorem 3.8.

  Expected improvement in walltime over standard decoding, when the target
  scores gamma + 1 prefixes in the time of one.

  Args:
    alpha: acceptance probability in [0, 1].
    gamma: guesses per iteration, a whole number >= 0.
    c: draft time / target time, finite and >= 0.

  Returns:
    The factor, in the broadcast shape; below 1 is a slow-down.

  Raises:
    ValueError: an argument is outside the range above.
  """
  gamma, c = _whole('gamma', gamma), _cost('c', c)
  return tokens_per_call(alpha, gamma) / (gamma * c + 1)


def speedup_bound(alpha: ArrayLike, c: ArrayLike) -> Float:
  """(1 + alpha) / (1 + c) when alpha > c, else 1: Corollary 3.9.

  What the best gamma is sure to reach. It is the speed-up at gamma = 1; at
  alpha <= c no gamma helps, and 1 is what decoding without a draft gives.

  Args:
    alpha: acceptance probability in [0, 1].
    c: draft time / target time, finite and >= 0.

  Returns:
    The factor, in the broadcast shape, never below 1.

  Raises:
    ValueError: an argument is outside the range above.
  """
  alpha, c = _alpha(alpha), _cost('c', c)
  return np.where(alpha > c, (1 + alpha) / (1 + c), 1.0)[()]


def operations(alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike) -> Float:
  """(1 - alpha)(gamma c_hat + gamma + 1) / (1 - alpha^(gamma+1)), Theorem 3.11.

  Expected increase in arithmetic operations over standard decoding.

  Args:
    alpha: acceptance probability in [0, 1].
    gamma: guesses per iteration, a whole number >= 0.
    c_hat: operations per token, draft / target, finite and >= 0.

  Returns:
    The factor, in the broadcast shape, never below 1.

  Raises:
    ValueError: an argument is outside the range above.
  """
  gamma, c_hat = _whole('gamma', gamma), _cost('c_hat', c_hat)
  return (gamma * c_hat + gamma + 1) / tokens_per_call(alpha, gamma)


def best_gamma(alpha: ArrayLike, c: ArrayLike, max_gamma: int = 256) -> Int:
  """The gamma that maximises Theorem 3.8, section 3.5.

  With T = `tokens_per_call`, going from gamma to gamma + 1 pays when

    alpha^(gamma+1) (gamma c + 1) > c T(gamma)

  The difference of the two sides never grows with gamma, so the first step
  that does not pay ends the search; the first step of all pays when alpha > c.

  Args:
    alpha: acceptance probability in [0, 1].
    c: draft time / target time, finite and >= 0.
    max_gamma: the largest gamma to consider, a whole number >= 0. It is the
      answer where more guesses always pay: c = 0 < alpha, or c < alpha = 1.

  Returns:
    Whole numbers in the broadcast shape; 0 where no gamma helps.

  Raises:
    ValueError: an argument is outside the range above.
  """
  alpha, c = np.broadcast_arrays(_alpha(alpha), _cost('c', c))
  limit = int(_whole('max_gamma', max_gamma))
  best = np.zeros(alpha.shape, np.int64)
  # Said apart because alpha^(gamma+1) underflows, or c gamma rounds.
  endless = ((c == 0) & (alpha > 0)) | ((alpha == 1) & (c < 1))
  pays = ~endless
  tokens, power = np.ones(alpha.shape), alpha
  for gamma in range(limit):
    pays = pays & (power * (gamma * c + 1) > c * tokens)
    if not pays.any():
      break
    best = best + pays
    tokens, power = tokens + power, power * alpha
  return np.where(endless, limit, best)[()]


def _alpha(alpha: ArrayLike) -> NDArray[np.float64]:
  alpha = np.asarray(alpha, np.float64)
  valid = (alpha >= 0) & (alpha <= 1)
  remedy = 'pass a mean of acceptance probabilities, clipped if it was rounded'
  _require(valid, alpha, 'alpha must be in [0, 1]', remedy)
  return alpha


def _cost(name: str, cost: ArrayLike) -> NDArray[np.float64]:
  cost = np.asarray(cost, np.float64)
  valid = (cost >= 0) & np.isfinite(cost)
  remedy = 'pass the cost of the draft divided by that of the target'
  _require(valid, cost, f'{name} must be finite and >= 0', remedy)
  return cost


def _whole(name: str, number: ArrayLike, least: int = 0) -> NDArray[np.int64]:
  number = np.asarray(number)
  valid = (number >= least) & np.isfinite(number)
  valid &= number == np.floor(number)
  remedy = 'pass a count, not a share or a mean'
  _require(valid, number, f'{name} must be a whole number >= {least}', remedy)
  return number.astype(np.int64)


def _distributions(
  p: ArrayLike, q: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
  p = np.atleast_1d(np.asarray(p, np.float64))
  q = np.atleast_1d(np.asarray(q, np.float64))
  remedy = 'pass probabilities, not logits or counts'
  for name, x in (('p', p), ('q', q)):
    _require(x >= 0, x, f'{name} must be >= 0', remedy)
    total = x.sum(axis=-1)
    near = np.abs(total - 1) <= _SUM_TOLERANCE
    _require(near, total, f'{name} must sum to 1 over its last axis', remedy)
  if p.shape[-1] != q.shape[-1]:
    raise ValueError(
      'p and q must share one vocabulary, got sizes'
      f' {p.shape[-1]} and {q.shape[-1]}: cut or pad both to the same tokens.'
    )
  return p, q


def _require(
  valid: ArrayLike, values: ArrayLike, expected: str, remedy: str
) -> None:
  if not np.all(valid):
    first = np.asarray(values)[~np.asarray(valid)].flat[0]
    raise ValueError(f'{expected}, got {first}: {remedy}.')
