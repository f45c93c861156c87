# SPDX-License-Identifier: Apache-2.0
"""Speculation inside T5X over four devices: meshes 1x4, 2x2 and 4x1.

Run as a program it does the work, in a process of its own: four devices of a
CPU must be asked for before JAX starts.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import seqio
from t5x import partitioning
from t5x import utils
from t5x.examples.t5 import network
import tensorflow as tf
import toy_models

from spec_decode.models import checkpoints
from spec_decode.models import t5x_checkpoints
from spec_decode.models import t5x_model
from spec_decode.models import transformer

SIZES = toy_models.T5_SIZES | {
  'vocab_size': 24,
  'num_heads': 4,
  'dropout_rate': 0.0,
}
TARGET = network.T5Config(**SIZES)
# 6 heads, as T5 1.1 small: four devices cannot share them.
DRAFT = network.T5Config(**(SIZES | {'num_heads': 6}))
RULES = [
  ('draft_vocab', 'model'),
  ('draft_embed', None),
  ('draft_mlp', 'model'),
  ('draft_heads', None),
  ('draft_joined_kv', 'model'),
  ('draft_relpos_buckets', None),
]
# Data x model -> the tile of T5X; None is its default, all on 'model'.
MESHES = {'1x4': None, '2x2': (1, 2), '4x1': (1, 1)}
STEP, ROWS, LENGTH = 1000, 8, 9


def model(prefix='draft_'):
  vocabulary = seqio.PassThroughVocabulary(24, eos_id=1)
  return t5x_model.SpeculativeEncoderDecoderModel(
    transformer.Transformer(TARGET),
    vocabulary,
    vocabulary,
    t5x_model.NetworkDraft(transformer.Transformer(DRAFT), vocabulary, prefix),
    gamma=3,
  )


def batch():
  inputs = np.random.default_rng(4).integers(2, 24, (ROWS, 8), np.int32)
  # Wide enough for encoding less than that, which all devices must agree on.
  inputs = np.pad(inputs, ((0, 0), (0, 56)))
  return {
    'encoder_input_tokens': inputs,
    'decoder_input_tokens': np.zeros((ROWS, LENGTH), np.int32),
  }


def decode(folder, tile):
  """Restores both checkpoints onto a mesh and decodes, as `infer` would."""
  partitioner = partitioning.PjitPartitioner(
    num_partitions=4 if tile is None else None,
    model_parallel_submesh=tile,
    logical_axis_rules=partitioning.standard_logical_axis_rules(
      additional_rules=RULES
    ),
  )
  whole, features = model(), batch()
  shapes = {name: x.shape for name, x in features.items()}
  init = utils.TrainStateInitializer(
    None, whole.get_initial_variables, shapes, partitioner
  )
  path = lambda half: os.path.join(folder, half, f'checkpoint_{STEP}')
  state = t5x_checkpoints.SpeculativeCheckpointManager(
    folder, init.global_train_state_shape, partitioner, path('draft')
  ).restore(path('target'))
  infer = utils.get_infer_fn(
    whole.predict_batch_with_aux, ROWS, init.train_state_axes, partitioner
  )
  dataset = tf.data.Dataset.from_tensor_slices(features).enumerate()
  rows, aux = infer(dataset, state, rng=jax.random.PRNGKey(0))
  spread = [
    x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params)
  ]
  return {
    'mesh': list(partitioner.mesh.devices.shape),
    'tokens': [np.asarray(tokens).tolist() for _, tokens in rows],
    'calls': np.asarray(aux['speculative']['target_calls']).tolist(),
    'split': spread.count(False),
  }


def test_every_mesh_decodes_the_same(tmp_path):
  target = toy_models.t5_params(TARGET, 0)
  draft = toy_models.t5_params(DRAFT, 1)
  checkpoints.save_t5x_legacy(tmp_path / 'target', target, STEP)
  checkpoints.save_t5x_orbax(tmp_path / 'draft', draft, STEP)
  flags = os.environ.get('XLA_FLAGS', '')
  environment = os.environ | {
    'XLA_FLAGS': f'{flags} --xla_force_host_platform_device_count=4',
    'JAX_PLATFORMS': 'cpu',
  }
  here = pathlib.Path(__file__)
  done = subprocess.run(
    [sys.executable, here.name, str(tmp_path)],
    cwd=here.parent,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  params = {'target': target, 'draft': draft}
  features = jax.tree.map(jnp.asarray, batch())
  tokens, aux = jax.jit(model().predict_batch_with_aux)(params, features)
  calls = aux['speculative']['target_calls'].tolist()
  # Rows end at different times, so one stop for all has to wait for the last.
  assert len(set(calls)) > 2
  assert found.keys() == MESHES.keys()
  for name, result in found.items():
    assert result['mesh'] == [int(n) for n in name.split('x')]
    assert result['tokens'] == np.asarray(tokens).tolist(), name
    assert result['calls'] == calls, name
    assert (result['split'] > 10) == (name != '4x1'), name


if __name__ == '__main__':
  print(json.dumps({k: decode(sys.argv[1], v) for k, v in MESHES.items()}))
