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
