# SPDX-License-Identifier: Apache-2.0
"""Measured speed-up beside two predictions of it (table 4).

Plain and speculative decoding take turns on the same prompts in one process;
medians after a warm-up, without compilation and file writing. Speed-ups are of
the loops; the one with the encoders is beside it.
"""

import functools
from typing import Any
import warnings

import jax
import numpy as np
import tqdm

from spec_decode import autoregressive
from spec_decode import speculative
from spec_decode import theory
from spec_decode.language_model import LanguageModel
from spec_decode.measure import costs as costs_lib
from spec_decode.speculative import Speculation
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
  if workload.gamma < 1:
    raise ValueError(
      f'Expected gamma >= 1 to time speculation, got {workload.gamma}.'
    )
  alpha = (earlier or {}).get('acceptance_rate', {}).get('alpha')
  config, (params, draft_params) = workload.speculation(), workload.params
  batches = [b for _, b in zip(range(num_batches), workload.batches())]
  plain_model, plain_params = workload.plain
  start, start_plain = _starts(config, plain_model)
  totals = dict.fromkeys(('plain', 'fast', 'start', 'start_plain'), 0.0)
  tokens = calls = differing = 0
  for batch in tqdm.tqdm(batches, desc='walltime', unit='batch'):
    keys = workload.keys(batch)
    seconds = costs_lib.medians(
      {
        'plain': functools.partial(workload.decode_plain, batch),
        'fast': functools.partial(workload.decode, batch, config),
        'start': functools.partial(
          start, params, draft_params, batch.inputs, keys, batch.prompt
        ),
        'start_plain': functools.partial(
          start_plain, plain_params, batch.inputs, keys, batch.prompt
        ),
      },
      repeats,
    )
    totals = {name: totals[name] + seconds[name] for name in totals}
    plain, fast = workload.decode_plain(batch), workload.decode(batch, config)
    real = slice(batch.count)
    unequal = np.any(np.asarray(plain.tokens != fast.tokens)[real], axis=1)
    differing += int(np.sum(unequal))
    # A batch takes as long as its longest row.
    tokens += int(np.max(fast.length[real]))
    calls += int(np.max(fast.target_calls[real]))
  cost = costs_lib.costs(
    config,
    params,
    draft_params,
    batches[0].inputs,
    repeats,
    plain=workload.plain,
  )
  summary = {
    'examples': sum(batch.count for batch in batches),
    **_summary(workload, cost, alpha, tokens / calls, totals),
  }
  if workload.temperature == 0:
    summary['differing_outputs'] = differing
  return summary


def _starts(config: Speculation, plain_model: LanguageModel):
  """What both loops do before their first token, compiled."""

  def start(params, draft_params, inputs, keys, prompt):
    state = speculative.init(config, params, draft_params, inputs, keys, prompt)
    return state.target_cache, state.draft_cache

  def start_plain(params, inputs, keys, prompt):
    state = autoregressive.init(
      plain_model, config.limits, params, inputs, keys, prompt
    )
    return state.cache

  return jax.jit(start), jax.jit(start_plain)


def _summary(workload: Workload, cost, alpha, per_call, totals):
  gamma = workload.gamma
  plain = totals['plain'] - totals['start_plain']
  fast = totals['fast'] - totals['start']
  predicted = per_call / (
    cost.draft_in_loop / cost.plain_step + cost.wide_ratio
  )
  summary = {
    'gamma': gamma,
    'batch_size': workload.batch_size,
    'speedup': plain / fast,
    'speedup_with_encoder': totals['plain'] / totals['fast'],
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
    **{f'{name}_seconds': value for name, value in totals.items()},
  }
  if alpha is not None:
    summary['best_gamma'] = int(theory.best_gamma(alpha, cost.c))
  if predicted < 1:
    warnings.warn(
      f'Speculation does not pay here: a block yields {per_call:.2f} tokens'
      f' and costs {per_call / predicted:.2f} plain steps,'
      f' {cost.wide_ratio:.2f} of them for the target call of width'
      f' {gamma + 1}. A draft closer to the target or another gamma may help.',
      stacklevel=2,
    )
  return summary
