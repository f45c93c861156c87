# SPDX-License-Identifier: Apache-2.0
"""Rows of tables 1 to 5: what was published, and our records beside it.

Every function takes the folder `experiments` and returns rows as dicts of
numbers and words, for pages and notebooks alike. A published row without a
record says why; records without a published row come last.
"""

from collections.abc import Callable
from collections.abc import Sequence
import csv
import math
import pathlib
import string
from typing import Any

from spec_decode import records

Row = dict[str, Any]
_SCALED_DOWN = 'scaled down'  # measured on a smaller pair
_FULL_SIZE = 'full size'
# How far a reproduced value may be from the published one.
_NEAR = 0.1


def table1(root: str) -> list[Row]:
  """Operations and speed of theory."""
  found = {}
  for record in read(root, 'table1'):
    for row in record['results']['curves']['rows']:
      found[row['alpha'], row['gamma']] = row, record
  rows = []
  for published in _published(root, 'table1_operations'):
    key = published['alpha'], int(published['gamma'])
    row = {'alpha': key[0], 'gamma': key[1]}
    row |= _prefixed('published', published, ('operations', 'speed'))
    if key in found:
      ours, record = found[key]
      row |= {'operations': ours['operations'], 'speed': ours['speed']}
      row |= {'status': _exact(row), 'n': 'exact', 'hardware': 'any'}
    rows.append({'status': 'not run: not measured yet'} | row)
  return rows


def table2(root: str) -> list[Row]:
  """Walltime against plain decoding."""
  keys = ('task', 'draft', 'temperature')
  return _joined(root, 'table2', 'table2_walltime', keys, _walltime)


def table3(root: str) -> list[Row]:
  """alpha of every draft."""
  keys = ('target', 'task', 'draft', 'temperature')
  return _joined(root, 'table3', 'table3_alpha', keys, _alphas)


def table4(root: str) -> list[Row]:
  """Predicted and measured speed-up."""
  keys = ('task', 'draft', 'temperature')
  name = 'table4_expected_vs_measured'
  return _joined(root, 'table4', name, keys, _walltime)


def table5(root: str) -> list[Row]:
  """alpha for several lenience levels."""
  keys = ('target', 'task', 'draft', 'temperature', 'lenience')
  return _joined(root, 'table5', 'table5_lenience', keys, _alphas_by_lenience)


def read(root: str, folder: str) -> list[dict[str, Any]]:
  """The newest record of each configuration, in order of first appearance."""
  path = pathlib.Path(root) / folder / 'records.jsonl'
  found = {}
  for record in records.read(path) if path.is_file() else []:
    work = record['results'].get('workload', {})
    names = (
      'target', 'task', 'draft', 'temperature', 'gamma', 'replay', 'lenience',
      'batch_size',
    )  # fmt: skip
    found[tuple(work.get(name) for name in names)] = record
  return list(found.values())


def newest(root: str, folder: str, **workload) -> dict[str, Any]:
  """The newest of the records that `read` gives, of those with `workload`.

  Raises:
    FileNotFoundError: there is none.
  """
  found = [
    record
    for record in read(root, folder)
    if workload.items() <= record['results'].get('workload', {}).items()
  ]
  if not found:
    raise FileNotFoundError(f'{root}/{folder} has no record.')
  return max(found, key=lambda record: record['time'])


def _joined(
  root: str,
  folder: str,
  csv_name: str,
  keys: Sequence[str],
  measured: Callable[[dict[str, Any]], list[Row]],
) -> list[Row]:
  """Published rows with ours beside them, then ours without a counterpart."""
  names, ours = _names(root), []
  for record in read(root, folder):
    work = record['results']['workload']
    common = {
      'temperature': work['temperature'],
      'pair': f'{work["task"]}: {work["target"]}, {work["draft"]}',
      'hardware': machine(record),
      'status': _status(record, names),
    } | {
      k: names.get(work[k], {}).get('paper', work[k])
      for k in ('target', 'task', 'draft')
    }
    ours += [common | row for row in measured(record['results'])]
  rows, used = [], set()
  for published in _published(root, csv_name):
    values = set(published) - set(keys)
    row = {k: published[k] for k in keys}
    row |= _prefixed('published', published, sorted(values))
    matching = [
      i for i, mine in enumerate(ours) if all(mine[k] == row[k] for k in keys)
    ]
    used.update(matching)
    reason = _reason(root, published)
    for mine in (ours[i] for i in matching):
      both = mine | row
      both['status'] = _beside(both)
      if reason and both['status'] == _SCALED_DOWN:
        both['status'] += f': {reason}'
      rows.append(both)
    if not matching:
      rows.append(row | {'status': f'not run: {reason or "not measured yet"}'})
  return rows + [mine for i, mine in enumerate(ours) if i not in used]


def _walltime(results: dict[str, Any]) -> list[Row]:
  times, rate = results['walltime'], results.get('acceptance_rate')
  names = (
    'gamma', 'speedup', 'speedup_error', 'c', 'c_alone', 'wide_ratio',
    'predicted_theorem_3_8', 'predicted_from_costs', 'tokens_per_call',
    'tokens_per_call_error', 'c_error', 'best_gamma_here', 'examples',
  )  # fmt: skip
  row = {name: times.get(name) for name in names}
  if rate:
    row |= {'alpha': rate['alpha'], 'alpha_error': rate['standard_error']}
  else:
    row |= {'alpha': results['workload']['replay'], 'alpha_error': 0.0}
  return [row]


def _alphas_by_lenience(results: dict[str, Any]) -> list[Row]:
  return [
    {
      'lenience': float(row['lenience']),
      'alpha': row['alpha'],
      'alpha_error': row['standard_error'],
      'tokens': row['tokens'],
      'examples': row['examples'],
    }
    for row in results['acceptance_rate']['by_lenience']
  ]


def _alphas(results: dict[str, Any]) -> list[Row]:
  row = _alphas_by_lenience(results)[0]
  # Of a run for these counts alone, or of the timed ones.
  decoded = results['acceptance_rate'].get('decoded', results.get('walltime'))
  if decoded is None:
    return [row]
  names = 'tokens_per_call', 'accepted_per_tested', 'accepted_per_drawn'
  for name in names:
    row |= {key: decoded.get(key) for key in (name, f'{name}_error')}
  return [row | {'gamma': decoded['gamma'], 'decoded': decoded['examples']}]


def status(root: str, record: dict[str, Any]) -> str:
  """What a record of decoding is, beside what was published."""
  return _status(record, _names(root))


def _names(root: str) -> dict[str, Row]:
  """Our names of tasks, targets and drafts, with the paper's."""
  return {row['ours']: row for row in _csv(root, 'names')}


def _status(record: dict[str, Any], names: dict[str, Row]) -> str:
  work = record['results']['workload']
  if work.get('replay') is not None:
    random = 'random weights, ' if work.get('random_weights') else ''
    return f'simulated: {random}accepted at {work["replay"]:g}'
  same = all(
    names.get(work[k], {}).get('same') == 'yes'
    for k in ('task', 'target', 'draft')
  )
  return _FULL_SIZE if same else _SCALED_DOWN


def simulated(row: Row) -> bool:
  """Whether a row is not of real acceptance."""
  return row['status'].startswith('simulated')


def _beside(row: Row) -> str:
  """The status of a row with its published values."""
  if row['status'] != _FULL_SIZE:
    return row['status']
  for ours, published in (
    ('speedup', 'published_speed'),
    ('speedup', 'published_measured'),
    ('alpha', 'published_alpha'),
  ):
    if row.get(ours) is not None and published in row:
      off = row[ours] / row[published] - 1
      found = 'reproduced' if abs(off) <= _NEAR else 'differs'
      return f'{found}: {100 * off:+.0f} %'
  return row['status']


def _exact(row: Row) -> str:
  equal = all(
    f'{row[name]:.2f}' == f'{row[f"published_{name}"]:.2f}'
    for name in ('operations', 'speed')
  )
  return 'reproduced' if equal else 'differs'


def _reason(root: str, published: Row) -> str | None:
  """Why a published row cannot be had as it was, where there is a reason."""
  for row in _csv(root, 'not_run'):
    if published.get(row['column']) == row['value']:
      return row['reason']
  return None


def machine(record: dict[str, Any]) -> str:
  """What a record was measured on."""
  hardware = record['hardware']
  if hardware['platform'] == 'cpu':
    return f'{hardware["cores"]} cores of {hardware["device"]}'
  return f'{hardware["devices"]} {hardware["device"]}'


def by_machine(
  found: Sequence[dict[str, Any]], rows: list[Row]
) -> tuple[str, list[Row]]:
  """The machines of the records, and the rows, with theirs if they differ.

  Args:
    found: a record per row.
    rows: cells by column.
  """
  names = [
    f'{machine(record)}, jax {record["versions"]["jax"]}' for record in found
  ]
  letters = dict(zip(dict.fromkeys(names), string.ascii_uppercase))
  if len(letters) == 1:
    return names[0], rows
  where = '; '.join(f'{letter}: {name}' for name, letter in letters.items())
  return where, [
    row | {'machine': letters[name]}
    for row, name in zip(rows, names, strict=True)
  ]


def with_error(value: float, error: float | None, digits: int) -> str:
  """The value, and its standard error; see `plus_minus`."""
  return f'{value:.{digits}f}{plus_minus(error, digits)}'


def plus_minus(error: float | None, digits: int) -> str:
  """A standard error; nothing where there is none, as of a single example."""
  known = error is not None and not math.isnan(error)
  return f' ± {error:.{digits}f}' if known else ''


def _prefixed(prefix: str, row: Row, names: Sequence[str]) -> Row:
  return {f'{prefix}_{name}': row[name] for name in names}


def _published(root: str, name: str) -> list[Row]:
  """Rows of one published table; what looks like a number is one."""
  return [
    {key: _number(value) for key, value in row.items()}
    for row in _csv(root, name)
  ]


def _number(value: str) -> float | str:
  try:
    return float(value)
  except ValueError:
    return value


def _csv(root: str, name: str) -> list[dict[str, str]]:
  path = pathlib.Path(root) / 'paper' / f'{name}.csv'
  with path.open(newline='', encoding='utf-8') as file:
    return list(csv.DictReader(file))
