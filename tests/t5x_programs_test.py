# SPDX-License-Identifier: Apache-2.0
"""One gin file through `t5x.infer` and `spec_decode.run`, each as a program.

Needs t5x, which is not on PyPI, on the Python path.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import toy_models

from spec_decode.models import checkpoints
from spec_decode.models import transformer

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = transformer.T5Config(vocab_size=8064, **toy_models.T5_SIZES)
GIN = """
from __gin__ import dynamic_registration

import __main__ as infer_script
from t5x import utils
from t5x.examples.t5 import network

include 'configs/runs/t5x_infer_debian.gin'

CHECKPOINT_PATH = '{folder}/target/checkpoint_1'
DRAFT_CHECKPOINT_PATH = '{folder}/draft/checkpoint_1'
TASK_FEATURE_LENGTHS = {{'inputs': 16, 'targets': 12}}
utils.DatasetConfig.batch_size = 4
infer_script.infer.num_shards = 16  # of which the first has 4 examples
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A tiny target, a draft that often agrees with it, and their gin file."""
  folder = tmp_path_factory.mktemp('programs')
  target = toy_models.t5_params(CONFIG, 0)
  head = target['decoder']['logits_dense']
  # Some rows end before others.
  head['kernel'] = head['kernel'].at[:, 1].multiply(4)
  draft = toy_models.perturbed(target, 1, 0.1)
  checkpoints.save_t5x_legacy(folder / 'target', target, 1)
  checkpoints.save_t5x_orbax(folder / 'draft', draft, 1)
  sizes = [
    f'{scope}network.T5Config.{name} = {value}\n'
    for scope in ('', 'draft/')
    for name, value in toy_models.T5_SIZES.items()
  ]
  (folder / 'tiny.gin').write_text(GIN.format(folder=folder) + ''.join(sizes))
  return folder


def start(folder, output, program, *flags):
  """A program that decodes as the gin file says, and writes to `output`."""
  return subprocess.Popen(
    [
      sys.executable, '-m', program, f'--gin_file={folder}/tiny.gin',
      f"--gin.INFER_OUTPUT_DIR='{folder / output}'", *flags,
    ],
    cwd=ROOT,
    env=os.environ
    | {
      'JAX_PLATFORMS': 'cpu',
      'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )  # fmt: skip


def lines(folder, output, programs):
  """What they wrote, once all of them have ended."""
  try:
    for program in programs:
      said, _ = program.communicate(timeout=600)
      assert program.returncode == 0, said
  finally:
    for program in programs:
      program.kill()
  (path,) = (folder / output).glob('*.jsonl-00000-of-00016')
  return [json.loads(line) for line in path.read_text().splitlines()]


def without_scores(lines):
  """Lines without their scores, and these."""
  rest = [
    line | {'aux': {'speculative': line['aux']['speculative']}}
    for line in lines
  ]
  return rest, [line['aux']['scores'] for line in lines]


@pytest.fixture(scope='module')
def alone(folder):
  return lines(folder, 'run', [start(folder, 'run', 'spec_decode.run')])


def test_both_programs_write_the_same(folder, alone):
  assert len({json.dumps(line['inputs']) for line in alone}) == 4
  assert sum(line['aux']['speculative']['accepted'] for line in alone) > 4
  program = start(folder, 'infer', 't5x.infer')
  assert lines(folder, 'infer', [program]) == alone


def test_two_processes_decode_what_one_does(folder, alone):
  """The rows of one process end early; it has to wait for the other."""
  calls = [line['aux']['speculative']['target_calls'] for line in alone]
  # T5X deals the rows out in turn.
  assert max(calls[::2]) < max(calls[1::2])
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  programs = [
    start(
      folder, 'two', 'spec_decode.run', f'--distributed=localhost:{port},2,{i}'
    )
    for i in range(2)
  ]
  found = lines(folder, 'two', programs)
  # A batch of half the rows may round its sums in another order.
  (ours, scores), (theirs, want) = map(without_scores, (found, alone))
  assert ours == theirs
  np.testing.assert_allclose(scores, want, rtol=1e-5)
