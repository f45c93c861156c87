# SPDX-License-Identifier: Apache-2.0
"""Replayed acceptance: a simulation that obeys theory and says what it is."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny

from spec_decode import acceptance
from spec_decode import generate
from spec_decode import theory
from spec_decode.measure import walltime
from spec_decode.measure.acceptance_rate import Ratio

ALPHA, GAMMA, LENGTH, ROWS = 0.7, 3, 24, 256


def _workload(tmp_path, temperature):
  return tiny.make(
    tmp_path,
    number=ROWS,
    temperature=temperature,
    gamma=GAMMA,
    max_new_tokens=LENGTH,
    batch_size=ROWS,
    replay=ALPHA,
  )


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_tokens_per_call_and_acceptance_are_those_of_theory(
  tmp_path, temperature
):
  workload = _workload(tmp_path, temperature)
  (batch,) = workload.batches()
  result = jax.device_get(workload.decode(batch))
  assert (result.length == LENGTH).all()  # nothing in the text ends it
  calls = result.target_calls
  expected = theory.tokens_with_cutoff(ALPHA, GAMMA, LENGTH)
  error = calls.std() / np.sqrt(ROWS)
  assert abs(calls.mean() - LENGTH / expected) < 4 * error
  rate = Ratio.of(result.accepted, result.tested)
  assert abs(rate.value - ALPHA) < 4 * rate.error


def test_all_and_nothing_accepted(tmp_path):
  workload = dataclasses.replace(_workload(tmp_path, 1.0), max_new_tokens=8)
  (batch,) = workload.batches()
  for alpha, calls in ((1.0, 2), (0.0, 8)):
    sure = dataclasses.replace(workload, replay=alpha)
    np.testing.assert_array_equal(sure.decode(batch).target_calls, calls)


def test_an_alpha_that_is_no_probability_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r'alpha in \[0, 1\], got 1.5'):
    acceptance.Replayed(1.5)
  (problem,) = tiny.make(tmp_path, replay=1.5).problems()
  assert 'alpha' in problem


def test_outputs_are_labelled(tmp_path):
  workload = tiny.make(tmp_path, temperature=0.0, replay=0.5)
  summary = generate.generate(workload, str(tmp_path), num_samples=1)
  assert 'differing_outputs' not in summary  # they differ, of course
  lines = (tmp_path / 'predictions.jsonl').read_text().splitlines()
  assert all(json.loads(line)['simulated'] for line in lines)
  assert 'Simulated' in (tmp_path / 'samples.txt').read_text()
  times = walltime.measure(
    workload, str(tmp_path), num_batches=1, repeats=1, gammas=()
  )
  assert 'differing_outputs' not in times
  assert times['predicted_theorem_3_8'] == pytest.approx(
    theory.speedup(0.5, workload.gamma, times['c'])
  )
