# SPDX-License-Identifier: Apache-2.0
"""Measured speed-up beside two predictions of it (table 4).

Plain and speculative decoding take turns on the same prompts in one process;
medians after a warm-up, without compilation and file writing. Speed-ups are
per token, since sampled texts differ in length, and of the loops alone; the one
with the encoders is beside it.
"""

import functools
from typing import Any
import warnings

import jax
import numpy as np
import tqdm

from spec_decode import checks
from spec_decode import theory
from spec_decode.measure import costs as costs_lib
from spec_decode.measure.acceptance_rate import counts
from spec_decode.workload import Workload


def problems(workload: Workload, **arguments) -> list[str]:
  """What `measure` cannot work on."""
  found = checks.below(1, arguments, 'num_batches', 'repeats', 'gammas')
  if workload.gamma == 0:
    found.append('Expected gamma >= 1 to time speculation, got 0. Raise it.')
  return found


def measure(
  workload: Workload,
  output_dir: str,
  earlier: dict[str, Any] | None = None,
  num_batches: int = 8,
  repeats: int = 5,
  gammas: tuple[int, ...] = (1, 3, 7),
) -> dict[str, Any]:
  """Times decoding with and without speculation on the same prompts.

  Args:
    workload: what to decode.
    output_dir: unused.
    earlier: alpha for Theorem 3.8 comes from its 'acceptance_rate', or from
      `workload.replay`; without either that prediction is left out.
    num_batches: how many batches to time.
    repeats: of each timing.
    gammas: others from which the best for this machine is chosen.

  Returns:
    For a record: seconds, speed-ups, c, both predictions, the best gamma, and
    a warning where speculation is slower by more than the standard error.
  """
  del output_dir
  alpha = workload.replay
  if alpha is None:
    alpha = (earlier or {}).get('acceptance_rate', {}).get('alpha')
  config, params = workload.speculation(), workload.params
  batches = [b for _, b in zip(range(num_batches), workload.batches())]
  timed = []
  for batch in tqdm.tqdm(batches, desc='walltime', unit='batch', leave=None):
    timed.append(_time(workload, config, batch, repeats))
  cost = costs_lib.costs(
    config,
    *params,
    batches[0].inputs,
    prompt=batches[0].prompt,
    gammas=gammas,
    repeats=repeats,
  )
  column = lambda name: np.array([row[name] for row in timed])
  summary = {
    'examples': sum(batch.count for batch in batches),
    'gamma': workload.gamma,
    'batch_size': workload.batch_size,
    **_speedups(column),
    # Counts of the timed runs, which are not alpha.
    **counts(*map(column, ('tokens', 'calls', 'drawn', 'tested', 'accepted'))),
  }
  per_call = summary['tokens_per_call']
  summary |= _predictions(alpha, cost, per_call) | _best_gamma(cost, per_call)
  if workload.temperature == 0 and workload.replay is None:
    summary['differing_outputs'] = int(column('differing').sum())
  error = summary['speedup_error']
  if summary['speedup'] + (0.0 if np.isnan(error) else error) < 1:
    summary['warning'] = reason(summary)
    warnings.warn(summary['warning'], stacklevel=2)
  return summary


def _time(workload: Workload, config, batch, repeats) -> dict[str, Any]:
  """Seconds and counts of one batch."""
  start = functools.partial(workload.start, batch, config)
  start_plain = functools.partial(workload.start_plain, batch)
  decode = functools.partial(workload.decode, batch, config, start())
  decode_plain = functools.partial(workload.decode_plain, batch, start_plain())
  row = costs_lib.medians(
    {
      'plain': decode_plain,
      'fast': decode,
      'start': start,
      'start_plain': start_plain,
    },
    repeats,
  )
  plain, fast = jax.device_get((decode_plain(), decode()))
  real = slice(batch.count)
  unequal = np.any(plain.tokens != fast.tokens, axis=1)
  return row | {
    'differing': np.sum(unequal[real]),
    # A batch takes as long as its longest row.
    'plain_tokens': np.max(plain.length[real]),
    'tokens': np.max(fast.length[real]),
    'calls': np.max(fast.target_calls[real]),
    'accepted': np.sum(fast.accepted[real]),
    'tested': np.sum(fast.tested[real]),
    'drawn': np.sum(fast.drawn[real]),
  }


def speedup(plain, plain_tokens, fast, fast_tokens) -> tuple[float, float]:
  """Plain over fast seconds per token, and its standard error.

  Args:
    plain, fast: seconds of each batch.
    plain_tokens, fast_tokens: what they gave. Batches are the clusters.
  """
  columns = [
    np.asarray(x, float) for x in (plain, fast_tokens, plain_tokens, fast)
  ]
  totals = [x.sum() for x in columns]
  value = totals[0] * totals[1] / totals[2] / totals[3]
  clusters = len(columns[0])
  if clusters < 2:
    return value, float('nan')
  # By the delta method: what each batch adds to the logarithm of the value.
  up, up_too, down, down_too = (x / t for x, t in zip(columns, totals))
  spread = np.sum((up + up_too - down - down_too) ** 2)
  return value, value * float(np.sqrt(spread * clusters / (clusters - 1)))


def _speedups(column) -> dict[str, float]:
  """Of the loops alone and with what comes before them."""
  tokens = column('plain_tokens'), column('tokens')
  plain, fast = column('plain'), column('fast')
  value, error = speedup(plain, tokens[0], fast, tokens[1])
  whole, _ = speedup(
    plain + column('start_plain'), tokens[0], fast + column('start'), tokens[1]
  )
  return {
    'speedup': value,
    'speedup_error': error,
    'speedup_with_encoder': whole,
    'plain_tokens': int(tokens[0].sum()),
    'tokens': int(tokens[1].sum()),
    **{
      f'{name}_seconds': float(column(name).sum())
      for name in ('plain', 'fast', 'start', 'start_plain')
    },
  }


def _predictions(alpha, cost, per_call) -> dict[str, Any]:
  predicted = per_call / (cost.draft_and_target / cost.plain_step)
  theorem = None
  if alpha is not None:
    theorem = float(theory.speedup(alpha, cost.gamma, cost.c))
  return {
    'predicted_from_costs': float(predicted),
    'predicted_theorem_3_8': theorem,
    'c': cost.c,
    'c_error': cost.c_error,
    'c_alone': cost.c_alone,
    'wide_ratio': cost.wide_ratios[cost.gamma],
    'wide_ratios': {str(g): ratio for g, ratio in cost.wide_ratios.items()},
    'overhead': cost.overhead,
    'plain_step_ms': 1e3 * cost.plain_step,
    'target_wide_ms': 1e3 * cost.wide[cost.gamma],
    'draft_in_loop_ms': 1e3 * cost.draft_in_loop,
    'iteration_ms': 1e3 * cost.iteration,
  }


def _best_gamma(cost, per_call: float) -> dict[str, Any]:
  """By what a block would yield and cost at each gamma; 0 if none pays."""
  # Of the blocks that were seen, not the paper's: it is right at this gamma.
  alpha = theory.alpha_of_tokens_per_call(per_call, cost.gamma)
  expected = {
    gamma: float(theory.tokens_per_call(alpha, gamma) / (gamma * cost.c + wide))
    for gamma, wide in cost.wide_ratios.items()
  }
  best = max(expected, key=expected.get)
  return {
    'expected_by_gamma': {str(g): x for g, x in expected.items()},
    'best_gamma_here': best if expected[best] > 1 else 0,
  }


def reason(summary: dict[str, Any]) -> str:
  """Why speculation costs more than it yields, and whether any gamma pays.

  Args:
    summary: what `measure` returns, with a speed-up below 1.
  """
  per_call, wide = summary['tokens_per_call'], summary['wide_ratio']
  steps = per_call / summary['predicted_from_costs']
  gamma, best = summary['gamma'], summary['best_gamma_here']
  expected = summary['expected_by_gamma']
  if best in (0, gamma):
    others = ', '.join(f'gamma {g} {x:.2f}x' for g, x in expected.items())
    advice = (
      f'Expected are {others}: only a closer or a cheaper draft can help.'
    )
  else:
    advice = f'Gamma {best} should give {expected[str(best)]:.2f}x.'
  return (
    f'Speculation does not pay here, measured {summary["speedup"]:.2f}x: a'
    f' block yields {per_call:.2f} tokens and costs {steps:.2f} plain steps,'
    f' {wide:.2f} of them for the target call of width {gamma + 1}. {advice}'
  )
