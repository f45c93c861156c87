# SPDX-License-Identifier: Apache-2.0
"""Measured speed-up beside two predictions of it (table 4).

Plain and speculative decoding take turns on the same prompts in one process;
medians after a warm-up, without compilation and file writing. Speed-ups are of
the loops; the one with the encoders is beside it.
"""

from typing import Any
import warnings

import jax
import numpy as np
import tqdm

from spec_decode import autoregressive
from spec_decode import speculative
from spec_decode import theory
from spec_decode.measure import costs as costs_lib
from spec_decode.workload import Workload


def measure(
  workload: Workload,
  output_dir: str,
  earlier: dict[str, Any] | None = None,
  num_batches: int = 8,
  repeats: int = 5,
) -> dict[str, Any]:
  """Times decoding with and without speculation on the same prompts.

  Args:
    workload: what to decode.
    output_dir: unused.
    earlier: alpha for Theorem 3.8 comes from its 'acceptance_rate'; without
      it that prediction is left out.
    num_batches: how many batches to time.
    repeats: of each timing.

  Returns:
    For a record: seconds, speed-ups, c, and both predictions.
  """
  del output_dir
  alpha = (earlier or {}).get('acceptance_rate', {}).get('alpha')
  config, (params, draft_params) = workload.speculation(), workload.params
  batches = [b for _, b in zip(range(num_batches), workload.batches())]
  plain_seconds = speculative_seconds = start_seconds = 0.0
  tokens = calls = differing = 0
  start = jax.jit(
    lambda p, d, x, k: (
      speculative.init(config, p, d, x, k).target_cache,
      speculative.init(config, p, d, x, k).draft_cache,
    )
  )
  start_plain = jax.jit(
    lambda p, x, k: (
      autoregressive.init(config.target, config.limits, p, x, k).cache
    )
  )
  for batch in tqdm.tqdm(batches, desc='walltime', unit='batch'):
    keys = workload.keys(batch)
    seconds = costs_lib.medians(
      {
        'plain': lambda b=batch: workload.decode_plain(b),
        'speculative': lambda b=batch: workload.decode(b, config),
        'start': lambda b=batch, k=keys: start(
          params, draft_params, b.inputs, k
        ),
        'start_plain': lambda b=batch, k=keys: start_plain(params, b.inputs, k),
      },
      repeats,
    )
    plain, fast = workload.decode_plain(batch), workload.decode(batch, config)
    real = slice(batch.count)
    differing += int(
      np.sum(np.any(np.asarray(plain.tokens != fast.tokens)[real], axis=1))
    )
    tokens += int(np.max(fast.length[real]))
    calls += int(np.max(fast.target_calls[real]))
    plain_seconds += seconds['plain'] - seconds['start_plain']
    speculative_seconds += seconds['speculative'] - seconds['start']
    start_seconds += seconds['start']
  cost = costs_lib.costs(
    config, params, draft_params, batches[0].inputs, repeats
  )
  return _summary(
    workload, cost, alpha, tokens, calls, plain_seconds, speculative_seconds,
    start_seconds, differing, sum(b.count for b in batches),
  )  # fmt: skip


def _summary(
  workload, cost, alpha, tokens, calls, plain, fast, start, differing, examples
):
  gamma = workload.gamma
  per_call = tokens / max(calls, 1)
  predicted = per_call / (
    cost.draft_in_loop / cost.plain_step + cost.wide_ratio
  )
  summary = {
    'gamma': gamma,
    'batch_size': workload.batch_size,
    'examples': examples,
    'speedup': plain / fast,
    'speedup_with_encoder': (plain + start) / (fast + start),
    'predicted_from_costs': predicted,
    'predicted_theorem_3_8': (
      None if alpha is None else float(theory.speedup(alpha, gamma, cost.c))
    ),
    'tokens_per_call': per_call,
    'c': cost.c,
    'c_alone': cost.c_alone,
    'wide_ratio': cost.wide_ratio,
    'overhead': cost.overhead,
    'plain_step_ms': 1e3 * cost.plain_step,
    'target_wide_ms': 1e3 * cost.target_wide,
    'draft_in_loop_ms': 1e3 * cost.draft_in_loop,
    'iteration_ms': 1e3 * cost.iteration,
    'plain_seconds': plain,
    'speculative_seconds': fast,
    'start_seconds': start,
  }
  if workload.temperature == 0:
    summary['differing_outputs'] = differing
  if alpha is not None:
    best = int(theory.best_gamma(alpha, cost.c))
    summary['best_gamma'] = best
    if best == 0:
      warnings.warn(
        f'Speculation cannot help: alpha {alpha:.2f} is not above c'
        f' {cost.c:.2f}. Use a cheaper draft or one closer to the target.',
        stacklevel=2,
      )
  return summary
