# SPDX-License-Identifier: Apache-2.0
"""Section 2 in plain NumPy, one row and one token at a time.

our name -> paper: logits, accepted -> n, extra -> t, uniform -> r_i.
"""

import numpy as np


def standardize(logits, temperature=1.0, top_k=0, top_p=1.0, forbidden=(0,)):
  """Distribution of one row of logits [V], by sorting."""
  z = np.asarray(logits, np.float64).copy()
  z[list(forbidden)] = -np.inf
  order = np.argsort(-z, kind='stable')  # equal logits: lowest id first
  p = np.zeros_like(z)
  if temperature == 0:
    p[order[0]] = 1.0
    return p
  kept = order[: top_k or len(order)]
  p[kept] = np.exp((z[kept] - z.max()) / temperature)
  p /= p.sum()
  if top_p < 1:
    mass = np.cumsum(p[order])
    count = 1 + int(np.searchsorted(mass, top_p - 1e-9))
    p[order[count:]] = 0.0
    p /= p.sum()
  return p


def algorithm_1(p, q, guesses, uniforms, lenience=1.0):
  """Returns n and the distribution of the extra token.

  Args:
    p: [G + 1, V], the target's.
    q: [G, V], the draft's.
    guesses: [G].
    uniforms: [G].
    lenience: multiplies q.
  """
  n = 0
  for x, p_i, q_i, r in zip(guesses, p, q, uniforms):
    if not r * lenience * q_i[x] < p_i[x]:
      break
    n += 1
  if n == len(guesses):
    return n, p[n]
  rest = np.maximum(p[n] - lenience * q[n], 0.0)
  if rest.sum() <= 0:
    return n, p[n]
  return n, rest / rest.sum()


def law(step, length, eos_id):
  """Probability of every finished sequence, by enumeration.

  Args:
    step: prefix tuple -> p [V].
    length: cap, in tokens.
    eos_id: ends a sequence.
  """
  finished, open_ = {}, {(): 1.0}
  for _ in range(length):
    longer = {}
    for prefix, mass in open_.items():
      for token, p in enumerate(step(prefix)):
        if p > 0:
          target = finished if token == eos_id else longer
          key = (*prefix, token)
          target[key] = target.get(key, 0.0) + mass * p
    open_ = longer
  return finished | open_


def speculative_law(rule, last, gamma, length, eos_id):
  """Probability of every finished sequence of the block-wise algorithm.

  Blocks are enumerated one after another: what each guess is, whether it
  stands, and the token after it. With an exact rule this equals `law`.

  Args:
    rule: prefix tuple -> (accepted [V], rest [V]): probability that a token
      is guessed and accepted, and law of the token after a rejection.
    last: prefix tuple -> law [V] of the token after gamma accepted guesses.
    gamma: guesses per block.
    length: cap, in tokens.
    eos_id: ends a sequence.
  """
  finished = {}
  pending = [((), 0, 1.0)]  # prefix, guesses accepted in its block, mass
  while pending:
    prefix, accepted, mass = pending.pop()
    if mass == 0:
      continue
    if len(prefix) == length or prefix[-1:] == (eos_id,):
      finished[prefix] = finished.get(prefix, 0.0) + mass
      continue
    if accepted == gamma:
      for token, p in enumerate(last(prefix)):
        pending.append(((*prefix, token), 0, mass * p))
      continue
    stands, rest = rule(prefix)
    rejected = mass * max(1 - stands.sum(), 0.0)
    for token in range(len(stands)):
      longer = (*prefix, token)
      pending.append((longer, accepted + 1, mass * stands[token]))
      pending.append((longer, 0, rejected * rest[token]))
  return finished


def sampling_rule(p, q, lenience=1.0):
  """The `rule` of one position: appendix A.5, Algorithm 1 for lenience 1."""
  stands = np.minimum(q, p / lenience)
  rest = np.maximum(p - lenience * q, 0.0)
  return stands, rest / rest.sum() if rest.sum() > 1e-12 else p


def argmax_rule(plain, q, lenience):
  """The same for argmax decoding; `plain` is the target's plain softmax."""
  best = np.eye(len(plain))[np.argmax(plain)]
  return np.where(plain >= lenience * plain.max(), q, 0.0), best
