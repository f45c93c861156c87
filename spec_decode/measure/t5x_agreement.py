# SPDX-License-Identifier: Apache-2.0
"""Whether speculation says what stock T5X says, example by example.

In float32 greedy outputs are the same. In bfloat16 a wide and a narrow call
round differently, so outputs part where two logits are close: how close is
reported.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from spec_decode.models import transformer
from spec_decode.workload import Workload


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
    difference of each other one by how much stock's logits prefer its token.
  """
  del output_dir, earlier
  if workload.mask or workload.temperature != 0:
    raise ValueError(
      'Expected temperature=0 and mask=False, got temperature ='
      f' {workload.temperature}, mask = {workload.mask}: samples of two'
      ' programs cannot agree, and stock T5X masks no ids.'
    )
  target, limits = workload.target, workload.limits
  params = dataclasses.replace(target, layout='checkpoint').load()
  decode = stock(
    target.config, limits.max_new_tokens, limits.eos_id, 0.0, one_hot=False
  )
  examples, gaps = 0, []
  batches = list(workload.batches())
  for batch in tqdm.tqdm(batches, desc='t5x_agreement', unit='batch'):
    ours = np.asarray(workload.decode(batch).tokens)[: batch.count]
    theirs = np.asarray(decode(params, jnp.asarray(batch.inputs)))
    theirs = theirs[: batch.count]
    examples += batch.count
    unequal = np.any(ours != theirs, axis=1)
    if unequal.any():
      logits = _logits(
        target.config, params, batch.inputs[: batch.count], theirs
      )
      gaps += [
        _gap(logits[row], ours[row], theirs[row])
        for row in np.flatnonzero(unequal)
      ]
  return {
    'dtype': str(target.config.dtype),
    'examples': examples,
    'identical': examples - len(gaps),
    'logit_gaps': gaps,
  }


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, inputs, tokens) -> jax.Array:
  """Teacher-forced logits [B, L, V] of each token [B, L]."""
  before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  module = transformer.Transformer(config)
  return module.apply({'params': params}, inputs, before, enable_dropout=False)


def _gap(logits, ours: np.ndarray, theirs: np.ndarray) -> float:
  """Stock's token over ours where they first differ; tokens [L]."""
  place = int(np.argmax(ours != theirs))
  return float(logits[place, theirs[place]] - logits[place, ours[place]])
