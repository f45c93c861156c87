# SPDX-License-Identifier: Apache-2.0
"""Checks of samples against a law."""

import collections

import numpy as np
from scipy import stats

# With fixed seeds a run repeats exactly; a right sampler fails a new seed once
# in ten thousand.
SIGNIFICANCE = 1e-4


def assert_follows(samples, law):
  """Chi-squared test of hashable samples against {sample: probability}."""
  counts = collections.Counter(samples)
  impossible = {s: n for s, n in counts.items() if law.get(s, 0.0) <= 0}
  assert not impossible, f'samples of probability 0: {impossible}'
  n = len(samples)
  expected = {s: n * p for s, p in law.items() if p > 0}
  # The usual rule: pool cells that expect fewer than 5.
  rare = [s for s, e in expected.items() if e < 5]
  cells = [(counts[s], e) for s, e in expected.items() if e >= 5]
  if rare:
    cells.append((sum(counts[s] for s in rare), sum(expected[s] for s in rare)))
  observed, expected = np.array(cells, float).T
  if len(cells) == 1:
    assert observed[0] == n
    return
  expected *= n / expected.sum()
  p_value = stats.chisquare(observed, expected).pvalue
  worst = np.argsort(-np.abs(observed - expected) / np.sqrt(expected))[:5]
  assert p_value > SIGNIFICANCE, (
    f'p = {p_value:.2g} for {n} samples in {len(cells)} cells; observed'
    f' {observed[worst]}, expected {expected[worst].round(1)}'
  )
