# SPDX-License-Identifier: Apache-2.0
"""Training: losses against NumPy, learning, and resuming exactly."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_decode import train
from spec_decode.data import text
from spec_decode.data import training
from spec_decode.models import checkpoints
from spec_decode.models import transformer


def _softmax(z):
  e = np.exp(z - z.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def test_losses_equal_their_formulas():
  rng = np.random.default_rng(0)
  z, teacher = rng.normal(size=(2, 3, 4, 7)).astype(np.float32)
  targets = rng.integers(0, 7, size=(3, 4))
  p, q = _softmax(teacher), _softmax(z)
  picked = np.take_along_axis(q, targets[..., None], -1)[..., 0]
  np.testing.assert_allclose(
    train.cross_entropy(z, targets, None), -np.log(picked), rtol=1e-5
  )
  distilled = -(p * np.log(q)).sum(-1)
  rejected = 1 - np.minimum(p, q).sum(-1)
  np.testing.assert_allclose(
    train.distillation(z, targets, teacher), distilled, rtol=1e-5
  )
  np.testing.assert_allclose(
    train.rejection(z, targets, teacher), rejected, rtol=1e-4, atol=1e-6
  )
  np.testing.assert_allclose(
    train.distillation_and_rejection(z, targets, teacher),
    distilled + rejected,
    rtol=1e-5,
  )


def test_schedule_warms_up_stays_and_falls_to_zero():
  schedule = train.Schedule(2.0, warmup_steps=4, decay_steps=5, steps=20)
  values = [float(schedule(i)) for i in range(21)]
  assert values[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
  assert values[15] == pytest.approx(2.0)
  assert values[18] == pytest.approx(0.8) and values[20] == 0.0


def _batches(tmp_path):
  return training.BucketedBatches(
    (training.Source(str(tiny.examples(tmp_path / 'a.jsonl', 8))),),
    text.Vocabulary(),
    ((24, 24),),
    tokens_per_batch=96,
  )


def _train(tmp_path, name, steps, **kwargs):
  schedule = train.Schedule(0.02, warmup_steps=2, decay_steps=1, steps=steps)
  return train.train(
    str(tmp_path / name), tiny.network(), _batches(tmp_path), schedule,
    save_every=2, log_every=2, **kwargs,
  )  # fmt: skip


def test_training_learns_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
  whole = _train(tmp_path, 'whole', 12)
  curve = [
    json.loads(line)
    for line in (tmp_path / 'whole' / 'curve.jsonl').read_text().splitlines()
  ]
  assert curve[-1]['loss'] < curve[0]['loss'] - 1.0
  assert whole['loss'] == curve[-1]['loss']

  class Stopped(Exception):
    pass

  def stop_after(step_fn, count):
    calls = iter(range(count))

    def step(*args):
      if next(calls, None) is None:
        raise Stopped
      return step_fn(*args)

    return step

  real = train.make_step
  monkeypatch.setattr(train, 'make_step', lambda *a: stop_after(real(*a), 7))
  with pytest.raises(Stopped):
    _train(tmp_path, 'parts', 12)
  monkeypatch.setattr(train, 'make_step', real)
  _train(tmp_path, 'parts', 12)
  config = tiny.network().config
  one, other = (
    checkpoints.load(tmp_path / name / 'model.safetensors', config)
    for name in ('whole', 'parts')
  )
  jax.tree.map(np.testing.assert_array_equal, one, other)
  with pytest.raises(ValueError, match='at least the 12 steps'):
    _train(tmp_path, 'parts', 6)


def test_a_draft_learns_its_teacher(tmp_path):
  _train(tmp_path, 'teacher', 12)
  teacher = tiny.network(
    checkpoint=str(tmp_path / 'teacher' / 'model.safetensors')
  )
  _train(
    tmp_path, 'draft', 12, loss=train.distillation_and_rejection,
    teacher=teacher, seed=5,
  )  # fmt: skip
  curve = (tmp_path / 'draft' / 'curve.jsonl').read_text().splitlines()
  first, last = (json.loads(curve[i])['loss'] for i in (0, -1))
  assert last < first - 0.5


def test_a_teacher_comes_with_its_loss_only(tmp_path):
  with pytest.raises(ValueError, match='teacher'):
    _train(tmp_path, 'x', 12, loss=train.distillation)
  with pytest.raises(ValueError, match='teacher'):
    _train(tmp_path, 'x', 12, teacher=tiny.network())


def test_deepening_keeps_what_was_learnt():
  shallow = tiny.network(layers=1)
  deep = tiny.network(layers=3)
  fresh_of = lambda network: transformer.initial_params(network.config, 0)
  old, fresh = fresh_of(shallow), fresh_of(deep)
  grown = train.deepen(old, fresh)
  inputs, targets = (
    jnp.arange(1, 31).reshape(3, 10),
    jnp.arange(30).reshape(3, 10),
  )

  @functools.partial(jax.jit, static_argnums=0)
  def logits(network, params):
    module = transformer.Transformer(network.config)
    args = {'params': params}, inputs, targets
    return module.apply(*args, enable_dropout=False)

  before, after = logits(shallow, old), logits(deep, grown)
  change = float(jnp.abs(before - after).mean())
  other = float(jnp.abs(before - logits(deep, fresh)).mean())
  assert 0 < change < 0.25 * other
  with pytest.raises(ValueError, match='number of layers'):
    train.deepen(jax.tree.map(lambda x: x[:8], old), fresh)


def test_decoder_inputs_are_the_targets_moved_by_one():
  targets = jnp.array([[5, 6, 1], [7, 1, 0]])
  assert train.shift_right(targets).tolist() == [[0, 5, 6], [0, 7, 1]]
