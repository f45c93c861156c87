# SPDX-License-Identifier: Apache-2.0
"""Runs jobs as gin configures them, and appends one record.

This is the only module that knows gin. Every binding must have an effect:
those that no job can reach are refused, since gin itself says nothing about a
mistyped scope or macro.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import os
import pathlib
from typing import Any

import gin
import tqdm

from spec_decode import records
from spec_decode.report import console
from spec_decode.workload import Network
from spec_decode.workload import Workload

Job = Callable[..., dict[str, Any]]
# Goes into every key. A number that a job gives under an old name with a new
# meaning makes this one more, so that sweeps measure again.
_MEANING = 2


class ConfigError(ValueError):
  """A configuration that was refused before any work began."""


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
      under its module's name. That module may have `problems(workload)`, what
      keeps its job from running, besides what `workload.problems` finds.
    output_dir: gets the jobs' files, config.gin and records.jsonl.
    name: of the run, in the record.
    workload: what the jobs work on.
    record_path: where the record goes instead; several get copies.
    resume: do nothing if the record of this very configuration, with these
      very weights, is there. Also keeps the table from the screen.
    only_check: stop where the work would begin.

  Returns:
    The record.

  Raises:
    ConfigError: something is wrong with the configuration.
  """
  problems = unreachable_bindings(run) + _unlike_names(jobs)
  if workload is not None:
    problems += workload.problems()
    for job in jobs:
      check = getattr(inspect.getmodule(job), 'problems', None)
      problems += check(workload) if check else []
  if problems:
    raise ConfigError(
      f'{len(problems)} thing(s) to correct, nothing was run:\n'
      + '\n'.join(f'  {i + 1}. {text}' for i, text in enumerate(problems))
    )
  if only_check:
    return None
  directory = pathlib.Path(output_dir).expanduser()
  paths = record_path or os.fspath(directory / 'records.jsonl')
  paths = [paths] if isinstance(paths, str) else paths
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
  """Says what was to be run, and with which weights."""
  parts = [gin.config_str(), str(_MEANING), *map(str, weights.items())]
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()


def _weights(workload: Workload | None) -> dict[str, str]:
  """SHA-256 of what target and draft come from, where that is local."""
  found = {}
  for role in ('target', 'draft') if workload else ():
    path = getattr(workload, role).path
    if path and pathlib.Path(path).exists():
      found[role] = _digest(pathlib.Path(path))
  return found


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
    finish: called with `experiments` after the last row.
    search_paths: folders that gin files are looked up in.

  Raises:
    ConfigError: something is wrong with rows, named together.
  """
  problems = unreachable_bindings(sweep)
  plan = [
    (row, [f'{experiments}/{name}/records.jsonl' for name in group.folders])
    for group in rows
    for row in group
  ]
  for (files, bindings), _ in plan:
    try:
      _configured(files, bindings, search_paths)(only_check=True)
    except ConfigError as error:
      problems.append(f'{" ".join([*files, *bindings])}: {error}')
  if problems:
    raise ConfigError('\n'.join(problems))
  with tqdm.tqdm(plan, desc='rows', unit='row') as bar:
    for (files, bindings), paths in bar:
      stems = [pathlib.Path(item).stem for item in (*files, *bindings)]
      bar.set_postfix_str(' '.join(stems))
      run_one = _configured(files, bindings, search_paths)
      run_one(record_path=paths, resume=True)
  gin.clear_config()  # the last row's
  if finish is not None:
    finish(experiments)


def _configured(files, bindings, search_paths) -> Callable:
  """`run` as nothing but these files and bindings configure it."""
  gin.clear_config()
  parse(files, bindings, search_paths)
  return gin.get_configurable(run)


def main(
  search_paths: Sequence[str] = ('.',), entry: Callable | None = None
) -> None:
  """Does what the parsed configuration is for: a sweep, a run or `entry`."""
  if any(name.endswith('.sweep') for _, name in gin.config._CONFIG):
    gin.get_configurable(sweep)(search_paths=search_paths)
  else:
    gin.get_configurable(entry or run)()


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


def parse(
  files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str]
) -> None:
  """Reads gin files and bindings.

  Raises:
    ConfigError: missing files, whatever gin cannot make sense of, or, where
      there is nothing of these, macros without a value; all that are found.
  """
  for path in search_paths:
    gin.add_config_file_search_path(path)
  problems = []
  for place, parse_one in (
    *((f, functools.partial(_parse_file, f, search_paths)) for f in files),
    *((b, functools.partial(gin.parse_config, b)) for b in bindings),
  ):
    try:
      parse_one()
    except Exception as error:  # gin raises what the values raise
      hint = ''
      if isinstance(error, SyntaxError):
        hint = ' Text needs quotes of its own: --gin.NAME="\'text\'".'
      problems.append(f'In {place}: {error}{hint}')
  problems = problems or [
    f'Expected a value for {name}, got none. Give --gin.{name}=...'
    for name in _macros_without_values()
  ]
  if not problems:
    try:
      gin.finalize()
    except Exception as error:  # such as a value that a file calls required
      problems.append(f'In the configuration: {error}')
  _refuse(problems)


def _refuse(problems: Sequence[str]) -> None:
  if problems:
    raise ConfigError('\n  '.join(['nothing was run:', *problems]))


def _parse_file(file: str, search_paths: Sequence[str]) -> None:
  if not any(os.path.exists(os.path.join(p, file)) for p in search_paths):
    raise FileNotFoundError(
      f'Expected a gin file {file!r}, found none in {list(search_paths)}.'
    )
  gin.parse_config_file(file)


def _macros_without_values() -> list[str]:
  """Names that bindings refer to as %NAME and that nothing gives a value."""
  config = gin.config._CONFIG
  named = {
    scope
    for parameters in config.values()
    for value in parameters.values()
    for scope, selector in _references(value, '')
    if selector == 'gin.macro'
  }
  return sorted(name for name in named if (name, 'gin.macro') not in config)


def t5x_search_paths() -> list[str]:
  """Where the names of T5X's own gin files begin, if it is installed."""
  package = importlib.util.find_spec('t5x')
  folders = package.submodule_search_locations if package else []
  return [os.path.dirname(folder) for folder in folders]


def refuse_idle_scopes(entry: Callable) -> None:
  """Refuses scoped bindings that nothing below a function of T5X uses.

  Unscoped ones are let through: T5X's own files have some.

  Raises:
    ConfigError: there are any.
  """
  _refuse([x for x in unreachable_bindings(entry) if '/' in x.split()[0]])


def unreachable_bindings(root: Callable) -> list[str]:
  """Bindings that no path of references from `root` leads to."""
  config = gin.config._CONFIG  # gin offers no other way to walk it
  wanted = gin.config._REGISTRY.get_match(
    f'{root.__module__}.{root.__name__}'
  ) or gin.config._REGISTRY.get_match(root.__name__)
  if wanted is None or not config:
    return []  # called directly, without a gin file
  reached: set[tuple[str, str]] = set()
  queue = [('', wanted.selector)]
  while queue:
    scope, selector = queue.pop()
    if (scope, selector) in reached:
      continue
    reached.add((scope, selector))
    for (at, name), parameters in config.items():
      inherits = at == scope or scope.startswith(at + '/') or not at
      if name == selector and inherits:
        reached.add((at, name))
        for value in parameters.values():
          queue.extend(_references(value, scope))
  known = sorted({_label(*key) for key in reached})
  found = []
  for key in config:
    if key not in reached and key[1] != 'gin.constant':
      label = _label(*key)
      near = difflib.get_close_matches(label, known, n=1)
      hint = f' Did you mean {near[0]}?' if near else ''
      found.append(f'{label} is bound, but nothing that runs uses it.{hint}')
  return found


def _label(scope: str, selector: str) -> str:
  if selector == 'gin.macro':
    return scope
  return f'{scope}/{selector}' if scope else selector


def _references(value: Any, scope: str) -> Iterable[tuple[str, str]]:
  """(scope, selector) of every configurable inside a bound value."""
  if isinstance(value, gin.config.ConfigurableReference):
    inner = '/'.join(value.scoped_selector.split('/')[:-1])
    selector = value.configurable.selector
    # A reference without a scope of its own inherits the one around it.
    yield (inner or (scope if selector != 'gin.macro' else ''), selector)
  elif isinstance(value, dict):
    for item in value.items():
      yield from _references(list(item), scope)
  elif isinstance(value, list | tuple):
    for item in value:
      yield from _references(item, scope)
