# SPDX-License-Identifier: Apache-2.0
"""What a workload makes of its settings."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from spec_decode import Sampling
from spec_decode.measure import acceptance_rate


def test_a_draft_may_have_its_own_standardization(tmp_path):
  workload = tiny.make(tmp_path, temperature=0.7, top_k=40)
  same = workload.speculation().draft.sampling
  assert same == workload.sampling
  assert (same.temperature, same.top_k, same.vocab_size) == (0.7, 40, 8000)
  own = Sampling(1.3, top_p=0.9)
  other = dataclasses.replace(workload, draft_sampling=own)
  assert other.speculation().draft.sampling == own
  assert other.speculation().sampling == workload.sampling


def test_alpha_sees_each_standardization(tmp_path):
  """The target as its own draft: what differs is the standardization alone."""
  workload = tiny.make(tmp_path, temperature=1.0)
  workload = dataclasses.replace(
    workload, draft=workload.target, draft_sampling=Sampling(0.0)
  )
  batch = next(workload.batches())
  tokens = np.array([[5, 6, 7], [8, 9, 10]], np.int32)
  arguments = *workload.params, batch.inputs, tokens
  (found,) = acceptance_rate.betas(workload.speculation(), (1.0,), *arguments)
  # min(p, one-hot) leaves p of the most likely id.
  logits = jax.jit(acceptance_rate.model_logits, static_argnums=0)(
    workload.target.model, workload.params[0], batch.inputs, tokens
  )
  logits = np.asarray(logits, np.float64)[..., 1:8000]
  p = np.exp(logits - logits.max(-1, keepdims=True))
  assert found == pytest.approx(1 / p.sum(-1), rel=1e-4)
