# SPDX-License-Identifier: Apache-2.0
"""One run, one JSON line: what was run, on what, and what came out."""

from collections.abc import Mapping
from collections.abc import Sequence
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax


def hardware() -> dict[str, Any]:
  """The machine, in words that a table can quote."""
  devices = jax.devices()
  return {
    'platform': devices[0].platform,
    'device': _processor()
    if devices[0].platform == 'cpu'
    else devices[0].device_kind,
    'devices': len(devices),
    'cores': os.cpu_count(),
  }


def _processor(cpuinfo: pathlib.Path = pathlib.Path('/proc/cpuinfo')) -> str:
  """The CPU's name, with family and model, since hosts cut names short."""
  said = {}
  if cpuinfo.is_file():
    for line in cpuinfo.read_text().splitlines():
      name, _, value = line.partition(':')
      said.setdefault(name.strip(), value.strip())
  if 'model name' not in said:
    return platform.processor() or platform.machine()
  if not {'cpu family', 'model'}.issubset(said):
    return said['model name']
  return (
    f'{said["model name"]} (family {said["cpu family"]}, model {said["model"]})'
  )


def _commit() -> str | None:
  """Commit of the source tree, with '+' when its code has changes."""
  here = pathlib.Path(__file__).parent
  git = lambda *args: subprocess.run(
    ['git', '-C', str(here), *args], capture_output=True, text=True
  )
  try:
    head = git('rev-parse', 'HEAD')
    # Installed inside some other project's tree, HEAD would be that one's.
    mine = git('ls-files', '--error-unmatch', __file__)
    if head.returncode or mine.returncode:
      return None
    # Records are no code, and a run adds to them.
    changed = git(
      'status', '--porcelain', '--untracked-files=no', '--', ':(top)',
      ':(top,exclude)experiments',
    ).stdout  # fmt: skip
  except OSError:
    return None
  return head.stdout.strip() + ('+' if changed.strip() else '')


def stamp(
  name: str, config: str, results: Mapping[str, Any], key: str = ''
) -> dict[str, Any]:
  """A record: `results` with what is needed to repeat and to judge them.

  `key` is that of `find`.
  """
  now = datetime.datetime.now(datetime.UTC)
  return {
    'name': name,
    'key': key,
    'time': now.isoformat(timespec='seconds'),
    'commit': _commit(),
    'hardware': hardware(),
    'versions': {
      package: importlib.metadata.version(package)
      for package in ('jax', 'jaxlib', 'flax', 'numpy')
    },
    'xla_flags': os.environ.get('XLA_FLAGS', ''),
    'config': config,
    'results': dict(results),
  }


def _strict(value: Any) -> Any:
  """`value` with None for floats that JSON has no number for."""
  if isinstance(value, Mapping):
    return {key: _strict(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_strict(item) for item in value]
  unknown = isinstance(value, float) and not math.isfinite(value)
  return None if unknown else value


def append(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
  """Adds one line; the file is created with its folder if need be.

  What is not a finite number, such as the error of a single example, becomes
  null.
  """
  path = pathlib.Path(path).expanduser()
  path.parent.mkdir(parents=True, exist_ok=True)
  line = json.dumps(_strict(record), ensure_ascii=False, allow_nan=False)
  with path.open('a', encoding='utf-8') as file:
    file.write(line + '\n')


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """All records of a file, oldest first.

  Raises:
    ValueError: a line that is not JSON, with its number.
  """
  records = []
  for number, line in enumerate(
    pathlib.Path(path).expanduser().read_text(encoding='utf-8').splitlines()
  ):
    try:
      records.append(json.loads(line))
    except ValueError as error:
      raise ValueError(
        f'Expected JSON in line {number + 1} of {path}, got {line[:60]!r}.'
      ) from error
  return records


def find(paths: Sequence[str], key: str) -> dict[str, Any] | None:
  """The newest record with this key in any of the files, or None."""
  found = None
  for path in paths:
    if pathlib.Path(path).expanduser().is_file():
      for record in read(path):
        if record.get('key') == key:
          found = record
  return found
