# SPDX-License-Identifier: Apache-2.0
"""Runs jobs as gin configures them, and appends one record."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import hashlib
import inspect
import itertools
import os
import pathlib
from typing import Any

import gin
import jax
import tqdm

from spec_decode import checks
from spec_decode import configuration
from spec_decode import records
from spec_decode.configuration import ConfigError
from spec_decode.configuration import parse
from spec_decode.configuration import unreachable_bindings
from spec_decode.data import text
from spec_decode.report import console
from spec_decode.workload import Network
from spec_decode.workload import Workload

Job = Callable[..., dict[str, Any]]
# Goes into every key. A number that a job gives under an old name with a new
# meaning makes this one more, so that sweeps measure again.
_MEANING = 3


def run(
  jobs: Sequence[Job],
  output_dir: str,
  name: str,
  workload: Workload | None = None,
  record_path: str | Sequence[str] | None = None,
  resume: bool = False,
  only_check: bool = False,
) -> dict[str, Any] | None:
  """Runs jobs one after another and appends one record of all.

  Args:
    jobs: called as job(workload, output_dir, results so far), or as
      job(output_dir) without a workload; what each returns is in the record
      under its module's name. That module may have `problems`, which is
      called with all arguments of its job, by name: what keeps it from running,
      besides what `workload.problems` finds.
    output_dir: gets the jobs' files, config.gin and records.jsonl.
    name: of the run, in the record.
    workload: what the jobs work on.
    record_path: where the record goes instead; several get copies.
    resume: do nothing if the record of this very configuration, with these
      very weights on such a machine, is there. Also keeps the table from the
      screen.
    only_check: stop where the work would begin.

  Returns:
    The record.

  Raises:
    ConfigError: something is wrong with the configuration.
  """
  wrong = checks.mistyped(run, locals())
  problems = wrong + unreachable_bindings(run)
  if not wrong:
    problems += _unlike_names(jobs) + _work_problems(jobs, output_dir, workload)
  if problems:
    raise ConfigError(
      f'{len(problems)} thing(s) to correct, nothing was run:\n'
      + '\n'.join(f'  {i + 1}. {text}' for i, text in enumerate(problems))
    )
  if only_check:
    return None
  directory, paths = _places(output_dir, record_path)
  weights = _weights(workload)
  key = _key(weights)
  record = records.find(paths, key) if resume else None
  if record is None:
    record = _run(jobs, directory, name, workload, weights, key)
    if workload is not None and not resume:
      console.show(workload, record['results'])
  for path in paths:
    if not resume or records.find([path], key) is None:
      records.append(path, record)
  return record


def _places(output_dir, record_path) -> tuple[pathlib.Path, Sequence[str]]:
  """Where a run's files and its record go.

  Of several processes each does the whole of a job, and only the first writes
  where it was told to.
  """
  directory = pathlib.Path(output_dir).expanduser()
  if index := jax.process_index():
    directory, record_path = directory / f'process_{index}', None
  paths = record_path or os.fspath(directory / 'records.jsonl')
  return directory, [paths] if isinstance(paths, str) else paths


def _work_problems(jobs, output_dir, workload) -> list[str]:
  """What the workload finds, and each job's module."""
  found, given, sound = [], (output_dir,), True
  if workload is not None:
    found, given = workload.problems(), (workload, output_dir, {})
    sound = not checks.mistyped(Workload, vars(workload))
  for job in jobs:
    try:
      arguments = configuration.arguments(job, *given)
    except ConfigError as error:
      found.append(str(error))
      continue
    wrong = checks.mistyped(job, arguments)
    found += wrong
    check = getattr(inspect.getmodule(job), 'problems', None)
    if check and sound and not wrong:
      found += check(**arguments)
  return found


def _run(jobs, directory, name, workload, weights, key) -> dict[str, Any]:
  """Runs the jobs; returns the record, which it does not append."""
  directory.mkdir(parents=True, exist_ok=True)
  results: dict[str, Any] = {}
  for job in jobs:
    folder = os.fspath(directory)
    arguments = (workload, folder, results) if workload else (folder,)
    results[_job_name(job)] = job(*arguments)
  config = gin.operative_config_str()
  (directory / 'config.gin').write_text(config, encoding='utf-8')
  described = _described(workload, weights) | results
  return records.stamp(name, config, described, key)


def _key(weights: dict[str, str]) -> str:
  """Says what was to be run, with which weights and on which machine."""
  parts = [
    gin.config_str(),
    str(_MEANING),
    *map(str, weights.items()),
    *map(str, records.hardware().items()),
  ]
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()


def _weights(workload: Workload | None) -> dict[str, str]:
  """SHA-256 of what target and draft come from, where that is local."""
  if workload is None:
    return {}
  paths = {'target': workload.target.path, 'draft': workload.draft.path}
  if getattr(workload.draft, 'shortlist', 0):
    paths['frequencies'] = text.resolve(workload.draft.frequencies)
  return {
    role: _digest(pathlib.Path(path))
    for role, path in paths.items()
    if path and pathlib.Path(path).exists()
  }


def _digest(path: pathlib.Path) -> str:
  """SHA-256 of a file, or of the names and contents of a folder."""
  if path.is_file():
    with path.open('rb') as file:
      return hashlib.file_digest(file, 'sha256').hexdigest()
  digest = hashlib.sha256()
  for inner in sorted(path.rglob('*')):
    if inner.is_file():
      digest.update(f'{inner.relative_to(path)} {_digest(inner)}\n'.encode())
  return digest.hexdigest()


def _unlike_names(jobs: Sequence[Job]) -> list[str]:
  """Refuses two jobs of one name, since a record holds one result of each."""
  names = [_job_name(job) for job in jobs]
  twice = sorted({name for name in names if names.count(name) > 1})
  return [
    f'Expected every job once, got {name} more than once. Give it a run of its'
    ' own.'
    for name in twice
  ]


@dataclasses.dataclass(frozen=True)
class Rows:
  """Runs that differ in a few choices: every combination is a row.

  A gin file and a binding are text; several may stand together in tuples.

  Attributes:
    files: gin files of all rows.
    folders: those of the sweep's `experiments` that get the records.
    choices: for each thing that varies, what there is to choose from.
    values: bindings of all rows, by name.
  """

  files: Any
  folders: Sequence[str]
  choices: Sequence[Any] = ()
  values: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __iter__(self) -> Iterator[tuple[list[str], list[str]]]:
    """(gin files, bindings) of each row."""
    common = [f'{name} = {value!r}' for name, value in self.values.items()]
    options = [[c] if isinstance(c, str) else c for c in self.choices]
    for chosen in itertools.product(*options):
      items = _flat((self.files, chosen))
      yield (
        [item for item in items if item.endswith('.gin')],
        common + [item for item in items if not item.endswith('.gin')],
      )


def _flat(item: Any) -> list[str]:
  """All text inside nested tuples, in order."""
  if isinstance(item, str):
    return [item]
  return [text for inner in item for text in _flat(inner)]


def sweep(
  rows: Sequence[Rows],
  experiments: str,
  finish: Callable[[str], None] | None = None,
  search_paths: Sequence[str] = ('.',),
) -> None:
  """Runs all rows whose records are not there yet, one after another.

  Stopped and called again it goes on where it was. All rows are checked before
  the first runs.

  Args:
    rows: what to run.
    experiments: has a folder with a records.jsonl per table or figure.
    finish: called with `experiments` after the last row. Its module may have
      `problems(experiments)`, what would keep it from working.
    search_paths: folders that gin files are looked up in.

  Raises:
    ConfigError: something is wrong with rows, named together.
  """
  check = getattr(inspect.getmodule(finish), 'problems', None)
  problems = unreachable_bindings(sweep) + (check(experiments) if check else [])
  plan = [
    (row, [f'{experiments}/{name}/records.jsonl' for name in group.folders])
    for group in rows
    for row in group
  ]
  for (files, bindings), _ in plan:
    try:
      _configured(files, bindings, search_paths)(only_check=True)
    except ConfigError as error:
      text = configuration.words(error)
      problems.append(f'{" ".join([*files, *bindings])}: {text}')
  if problems:
    raise ConfigError('\n'.join(problems))
  with tqdm.tqdm(plan, desc='rows', unit='row') as bar:
    for (files, bindings), paths in bar:
      stems = [pathlib.Path(item).stem for item in (*files, *bindings)]
      bar.set_postfix_str(' '.join(stems))
      run_one = _configured(files, bindings, search_paths)
      run_one(record_path=paths, resume=True)
  gin.clear_config()  # the last row's
  if finish is not None and not jax.process_index():
    finish(experiments)


def _configured(files, bindings, search_paths) -> Callable:
  """`run` as nothing but these files and bindings configure it."""
  gin.clear_config()
  parse(files, bindings, search_paths)
  return _configurable(run)


def _configurable(function: Callable) -> Callable:
  """`function` as gin calls it; a ConfigError if it cannot."""
  configuration.arguments(function)
  return gin.get_configurable(function)


def main(
  search_paths: Sequence[str] = ('.',), entry: Callable | None = None
) -> None:
  """Does what the parsed configuration is for: a sweep, a run or `entry`."""
  if any(name.endswith('.sweep') for _, name in gin.config._CONFIG):
    _configurable(sweep)(search_paths=search_paths)
  elif entry is not None:
    gin.get_configurable(entry)()
  else:
    _configurable(run)()


def _job_name(job: Job) -> str:
  """module_name of a job such as walltime.measure."""
  module = getattr(job, '__module__', '').rpartition('.')[2]
  return module or job.__name__


def _described(workload: Workload | None, weights) -> dict[str, Any]:
  if workload is None:
    return {}
  return {
    'workload': {
      'task': workload.prompts.task,
      'target': workload.target.name,
      'draft': workload.draft.name,
      'shortlist': getattr(workload.draft, 'shortlist', 0),
      'temperature': workload.temperature,
      'gamma': workload.gamma,
      'lenience': workload.lenience,
      'batch_size': workload.batch_size,
      'replay': workload.replay,
      'weights': weights,
      'random_weights': [
        network.name
        for network in (workload.target, workload.draft)
        if isinstance(network, Network) and network.path is None
      ],
    }
  }
