# SPDX-License-Identifier: Apache-2.0
"""Conversion to T5X's layouts, read back without T5X."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from spec_decode import convert
from spec_decode.models import checkpoints


def stored(tmp_path, name, seed):
  """A network with a checkpoint of ours."""
  fresh = dataclasses.replace(tiny.network(), layout='checkpoint')
  path = str(tmp_path / f'{name}.safetensors')
  checkpoints.save(path, jax.tree.map(lambda x: x * seed, fresh.load()))
  return dataclasses.replace(fresh, checkpoint=path)


@pytest.mark.parametrize('layout', ['orbax', 'legacy'])
def test_both_networks_arrive(tmp_path, layout):
  networks = [stored(tmp_path, 'a', 1), stored(tmp_path, 'b', 2)]
  found = convert.to_t5x(str(tmp_path / 'out'), *networks, layout, step=7)
  for half, network in zip(('target', 'draft'), networks):
    path = found[half]['written']
    assert path == str(tmp_path / 'out' / half / 'checkpoint_7')
    got = checkpoints.load(path, network.config)
    jax.tree.map(np.testing.assert_array_equal, got, network.load())


def test_nothing_is_made_up(tmp_path):
  good = stored(tmp_path, 'a', 1)
  (problem,) = convert.problems(good, good, layout='zip')
  assert "got 'zip'" in problem
  (problem,) = convert.problems(tiny.network(), good, layout='orbax')
  assert 'Expected a checkpoint of tiny' in problem
  wider = dataclasses.replace(tiny.network(emb_dim=8), checkpoint='no/where')
  (problem,) = convert.problems(wider, good, layout='orbax')
  assert 'no/where' in problem
  assert convert.problems(good, good, layout='legacy') == []
