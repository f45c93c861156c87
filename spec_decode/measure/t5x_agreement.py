# SPDX-License-Identifier: Apache-2.0
"""Whether speculation says what stock T5X says, example by example.

In float32 greedy outputs are the same. In bfloat16 a wide and a narrow call
round differently, so outputs part where two logits are close: how close is
reported.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import tqdm

from spec_decode.measure import exactness
from spec_decode.workload import Workload


def problems(workload: Workload, **_) -> list[str]:
  """What `measure` cannot work on."""
  if not workload.mask and workload.temperature == 0:
    return []
  return [
    'Expected temperature=0 and mask=False, got temperature ='
    f' {workload.temperature}, mask = {workload.mask}: samples of two programs'
    ' cannot agree, and stock T5X masks no ids.'
  ]


def measure(
  workload: Workload,
  output_dir: str,
  earlier: dict[str, Any] | None = None,
  *,
  stock: Callable[..., Callable],
) -> dict[str, Any]:
  """Decodes all prompts with both.

  Args:
    workload: what to decode, at temperature 0 and with `mask` off.
    output_dir: unused.
    earlier: unused.
    stock: `t5x_stock.decoder`.

  Returns:
    For a record: examples, how many have identical outputs, and at the first
    difference of each other one by how much the target's logits prefer
    stock's token.
  """
  del output_dir, earlier
  target, limits = workload.target, workload.limits
  params = dataclasses.replace(target, layout='checkpoint').load()
  decode = stock(
    target.config, limits.max_new_tokens, limits.eos_id, 0.0, one_hot=False
  )
  examples, gaps = 0, []
  batches = list(workload.batches())
  for batch in tqdm.tqdm(batches, desc='t5x_agreement', unit='batch'):
    ours = np.asarray(workload.decode(batch).tokens)
    theirs = np.asarray(decode(params, jnp.asarray(batch.inputs)))
    examples += batch.count
    gaps += exactness.logit_gaps(workload, batch, ours, theirs)
  return {
    'dtype': str(target.config.dtype),
    'examples': examples,
    'identical': examples - len(gaps),
    'logit_gaps': gaps,
  }
