# SPDX-License-Identifier: Apache-2.0
"""What the paper derives instead of measuring: table 1 and figures 2 to 4.

As jobs, so that theory has records as everything else has.
"""

from typing import Any

import numpy as np

from spec_decode import theory

_ALPHA = np.round(np.arange(0, 1.001, 0.01), 2)
# Where alpha is 1 some curves are infinite.
_BELOW_ONE = _ALPHA[_ALPHA < 0.995]


def problems(name: str, **_) -> list[str]:
  """What `measure` does not know."""
  if name in CURVES:
    return []
  return [f'Expected a name of {sorted(CURVES)}, got {name!r}. Choose one.']


def measure(output_dir: str, name: str) -> dict[str, Any]:
  """The numbers of one table or figure, by its name in `CURVES`."""
  del output_dir
  return CURVES[name]()


def table1(
  points: tuple[tuple[float, int], ...] = (
    (0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10),
  ),
) -> dict[str, Any]:  # fmt: skip
  """Operations and speed for (alpha, gamma), c = c_hat = 0."""
  return {
    'rows': [
      {
        'alpha': alpha,
        'gamma': gamma,
        'operations': float(theory.operations(alpha, gamma, 0)),
        'speed': float(theory.speedup(alpha, gamma, 0)),
      }
      for alpha, gamma in points
    ]
  }


def figure2(gammas: tuple[int, ...] = (1, 3, 5, 7, 10)) -> dict[str, Any]:
  """Tokens per iteration against alpha; the last curve is the oracle's."""
  return {
    'alpha': _BELOW_ONE.tolist(),
    'tokens': {
      str(gamma): theory.tokens_per_call(_BELOW_ONE, gamma).tolist()
      for gamma in gammas
    },
    'oracle': theory.oracle_tokens_per_call(_BELOW_ONE).tolist(),
  }


def figure3(
  costs: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1),
) -> dict[str, Any]:
  """The best gamma against alpha, for several c."""
  return {
    'alpha': _BELOW_ONE.tolist(),
    'gamma': {str(c): theory.best_gamma(_BELOW_ONE, c).tolist() for c in costs},
  }


def figure4(gammas: tuple[int, ...] = (1, 3, 5, 7, 10)) -> dict[str, Any]:
  """Speed and operations against alpha for c = c_hat = 0."""
  curves = lambda formula: {
    str(gamma): formula(_ALPHA, gamma, 0).tolist() for gamma in gammas
  }
  return {
    'alpha': _ALPHA.tolist(),
    'speed': curves(theory.speedup),
    'operations': curves(theory.operations),
  }


CURVES = {
  'table1': table1,
  'figure2': figure2,
  'figure3': figure3,
  'figure4': figure4,
}
