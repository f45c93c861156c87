# SPDX-License-Identifier: Apache-2.0
"""Speculation against stock T5X, in one process on the same examples.

Four ways of decoding take turns: stock T5X; stock T5X with its one-hot
embedding replaced by a look-up, which is what stock should be compared as; our
plain decoding; our speculation. Medians after a warm-up, encoders included,
without compilation, input and output.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import tqdm

from spec_decode import checks
from spec_decode.measure import costs as costs_lib
from spec_decode.workload import Workload

NAMES = ('stock', 'stock_gather', 'plain', 'speculative')


def problems(workload: Workload, **arguments) -> list[str]:
  """What `measure` cannot work on."""
  found = checks.below(1, arguments, 'num_batches', 'repeats')
  if workload.mask:
    found.append(
      'Expected mask=False: stock T5X masks no ids, so the two would not sample'
      ' from the same distribution.'
    )
  return found


def measure(
  workload: Workload,
  output_dir: str,
  earlier: dict[str, Any] | None = None,
  *,
  stock: Callable[..., Callable],
  num_batches: int = 8,
  repeats: int = 5,
) -> dict[str, Any]:
  """Times the four on the same batches.

  Args:
    workload: what to decode; `mask` must be off, since stock masks nothing.
    output_dir: unused.
    earlier: unused.
    stock: `t5x_stock.decoder`.
    num_batches: how many batches to time.
    repeats: of each timing.

  Returns:
    For a record: milliseconds per token of each, their ratios, and at
    temperature 0 the examples that differ from stock's.
  """
  del output_dir, earlier
  target, limits = workload.target, workload.limits
  params = dataclasses.replace(target, layout='checkpoint').load()
  decoders = [
    stock(
      target.config,
      limits.max_new_tokens,
      limits.eos_id,
      workload.temperature,
      one_hot,
    )
    for one_hot in (True, False)
  ]
  totals = dict.fromkeys(NAMES, 0.0)
  tokens = dict.fromkeys(NAMES, 0)
  examples = differing = calls = 0
  batches = [b for _, b in zip(range(num_batches), workload.batches())]
  for batch in tqdm.tqdm(batches, desc='t5x_walltime', unit='batch'):
    inputs = jnp.asarray(batch.inputs)
    functions = {
      **{
        name: functools.partial(decode, params, inputs)
        for name, decode in zip(NAMES, decoders)
      },
      'plain': functools.partial(workload.decode_plain, batch),
      'speculative': functools.partial(workload.decode, batch),
    }
    seconds = costs_lib.medians(functions, repeats)
    results = {name: function() for name, function in functions.items()}
    calls += int(np.max(results['speculative'].target_calls[: batch.count]))
    ids = {
      name: np.asarray(x if name in NAMES[:2] else x.tokens)[: batch.count]
      for name, x in results.items()
    }
    for name in NAMES:
      totals[name] += seconds[name]
      # A batch takes as long as its longest row.
      tokens[name] += _longest(ids[name])
    examples += batch.count
    unequal = np.any(ids['speculative'] != ids['stock'], axis=1)
    differing += int(np.sum(unequal))
  per_token = {name: totals[name] / tokens[name] for name in NAMES}
  summary = {
    'examples': examples,
    'tokens': tokens,
    'tokens_per_call': tokens['speculative'] / calls,
    'ms_per_token': {name: 1e3 * t for name, t in per_token.items()},
  }
  for base in NAMES[:3]:
    summary[f'speedup_over_{base}'] = {
      name: per_token[base] / per_token[name] for name in NAMES
    }
  if workload.temperature == 0:
    summary['differing_outputs'] = differing
  return summary


def _longest(ids: np.ndarray) -> int:
  """Tokens of the longest row, up to the last that is not padding."""
  return int(np.max(np.where(ids != 0, np.arange(1, ids.shape[1] + 1), 0)))
