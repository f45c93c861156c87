# SPDX-License-Identifier: Apache-2.0
"""What the launchers would run."""

import os
import pathlib
import shlex
import signal
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
GIN_FILE = 'configs/runs/t5x_infer_ende_small_t0.gin'
VALUE = '''--gin.CHECKPOINT_PATH="'gs://a b/checkpoint_1'"'''


def launch(script, *arguments, **environment):
  return subprocess.run(
    ['bash', f'scripts/{script}', *arguments],
    cwd=ROOT,
    env=os.environ | environment,
    capture_output=True,
    text=True,
    check=False,
  )


def printed(script, *arguments):
  """The commands of a dry run, as the words that a shell would see."""
  done = launch(script, '--dry-run', *arguments)
  assert done.returncode == 0, done.stderr
  return [shlex.split(line) for line in done.stdout.splitlines()]


def on_workers(**environment):
  """What a dry run hands to gcloud, and the command in it for the workers."""
  # $'...' is how bash quotes lines, which shlex does not know.
  done = launch(
    'tpu_pod.sh', '--dry-run', 'pod', 'zone-b', GIN_FILE, VALUE, **environment
  )
  assert done.returncode == 0, done.stderr
  say = 'git() { :; }\ngcloud() { printf "%s\\n" "$@"; }\n'
  words = subprocess.run(
    ['bash', '-c', say + done.stdout],
    capture_output=True, text=True, check=True,
  ).stdout  # fmt: skip
  return words, words.partition('--command=')[2]


def test_a_pod_gets_the_code_and_one_command_on_every_worker():
  words, command = on_workers()
  assert words.count('--worker=all') == 2
  assert words.count('--zone=zone-b') == 2
  (job,) = [line for line in command.splitlines() if 'spec_decode.run' in line]
  assert shlex.split(job) == [
    'python', '-m', 'spec_decode.run', '--distributed=auto',
    f'--gin_file={GIN_FILE}', VALUE,
  ]  # fmt: skip
  assert '.[t5x]' in command and 'scripts/t5x_requirements.txt' in command


@pytest.mark.parametrize('name', ['python3', 'python3.12'])
def test_a_worker_refuses_an_older_python_first(tmp_path, name):
  stub = tmp_path / name
  stub.write_text(
    '#!/bin/sh\ncase $1 in -c) exit 1;; --version) echo Python 3.10.1;; esac'
  )
  stub.chmod(0o755)
  _, command = on_workers(PYTHON=name) if name != 'python3' else on_workers()
  done = subprocess.run(
    ['bash', '-c', command],
    cwd=tmp_path,
    env=os.environ | {'PATH': f'{tmp_path}:{os.environ["PATH"]}'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert 'Expected Python 3.11 or later, got: Python 3.10.1' in done.stderr
  assert 'PYTHON=python3.11' in done.stderr
  assert list(tmp_path.iterdir()) == [stub]


def test_a_node_gets_a_process_for_each_gpu():
  commands = printed('gpu_node.sh', '--gpus=3', GIN_FILE, VALUE)
  assert len(commands) == 3
  for i, words in enumerate(commands):
    assert words[:5] == [
      'env', f'CUDA_VISIBLE_DEVICES={i}', 'python', '-m', 'spec_decode.run',
    ]  # fmt: skip
    assert words[5].startswith('--distributed=localhost:')
    assert words[5].endswith(f',3,{i}')
    assert words[-2:] == [f'--gin_file={GIN_FILE}', VALUE]


def test_stopping_a_node_stops_its_processes(tmp_path):
  """A stand-in for Python tells its process id through a pipe and waits."""
  pipe = tmp_path / 'pipe'
  os.mkfifo(pipe)
  stub = tmp_path / 'python'
  stub.write_text(f'#!/bin/sh\necho $$ > {pipe}\nexec sleep 60\n')
  stub.chmod(0o755)
  launcher = subprocess.Popen(
    ['bash', 'scripts/gpu_node.sh', '--gpus=2', GIN_FILE],
    cwd=ROOT,
    env=os.environ | {'PATH': f'{tmp_path}:{os.environ["PATH"]}'},
  )
  started = []
  while len(started) < 2:  # opening the pipe waits for a writer
    started += pipe.read_text().split()
  launcher.send_signal(signal.SIGTERM)
  assert launcher.wait(timeout=30) != 0
  for process in started:
    with pytest.raises(ProcessLookupError):
      os.kill(int(process), 0)


@pytest.mark.parametrize(
  'words',
  [
    ['tpu_pod.sh', 'pod', 'zone', 'configs/nowhere.gin'],
    ['tpu_pod.sh', 'pod'],
    ['gpu_node.sh', '--gpus=2', 'configs/nowhere.gin'],
  ],
)
def test_a_missing_gin_file_is_refused(words):
  done = launch(words[0], *words[1:])
  assert done.returncode == 2
  assert 'Expected' in done.stderr
