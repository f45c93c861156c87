# SPDX-License-Identifier: Apache-2.0
"""Replayed acceptance: a simulation that obeys theory and says what it is."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_decode import acceptance
from spec_decode import generate
from spec_decode import theory
from spec_decode.measure.acceptance_rate import Ratio
from spec_decode.sampling import Sampling

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


def test_all_and_nothing_accepted_of_what_was_drawn():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(4, GAMMA + 1, 7))
  q = rng.dirichlet(np.ones(7), size=(4, GAMMA))
  guesses = rng.integers(1, 7, (4, GAMMA))
  drawn = np.array([0, 1, 2, 3])
  uniforms = rng.random((4, GAMMA)), rng.random((4, 2))
  arguments = (logits, guesses, drawn, q, *uniforms, Sampling(), 1.0)
  for alpha, expected in ((1.0, drawn), (0.0, 0 * drawn)):
    accepted, extra = acceptance.Replayed(alpha)(*map(_array, arguments))
    np.testing.assert_array_equal(accepted, expected)
    assert ((extra >= 1) & (extra < 7)).all()


def _array(x):
  return jnp.asarray(x) if isinstance(x, np.ndarray) else x


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
