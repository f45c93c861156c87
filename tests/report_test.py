# SPDX-License-Identifier: Apache-2.0
"""Pages: every number comes from a record, every published row is there."""

import copy
import pathlib
import shutil

import pytest

from spec_decode import records
from spec_decode.report import pages
from spec_decode.report import tables

PAPER = pathlib.Path(__file__).parents[1] / 'experiments' / 'paper'
HARDWARE = {'platform': 'cpu', 'device': 'Abacus', 'devices': 1, 'cores': 7}
RATE = {
  'alpha': 0.4321,
  'standard_error': 0.0123,
  'by_lenience': [
    {
      'lenience': level,
      'alpha': alpha,
      'standard_error': 0.0123,
      'tokens': 9876,
      'examples': 55,
    }
    for level, alpha in ((1.0, 0.4321), (0.5, 0.5432), (0.1, 0.6543))
  ],
}
TIMES = {
  'gamma': 3,
  'speedup': 1.2345,
  'speedup_error': 0.0456,
  'c': 0.0789,
  'c_error': 0.0123,
  'c_alone': 0.05,
  'wide_ratio': 1.41,
  'predicted_theorem_3_8': 1.56,
  'predicted_from_costs': 1.27,
  'tokens_per_call': 2.1,
  'best_gamma_here': 7,
  'examples': 16,
}


def _record(draft='debian-small', temperature=0.0, replay=None, **results):
  workload = {
    'task': 'Debian En-De',
    'target': 'debian-target (13M)',
    'draft': draft,
    'temperature': temperature,
    'gamma': 3,
    'replay': replay,
  }
  return {
    'time': '2026-01-01T00:00:00+00:00',
    'hardware': HARDWARE,
    'results': {'workload': workload, **copy.deepcopy(results)},
  }


@pytest.fixture
def root(tmp_path):
  """A folder of experiments with records of one pair and a replayed one."""
  shutil.copytree(PAPER, tmp_path / 'paper')
  rated = {'acceptance_rate': RATE, 'walltime': TIMES}
  # One batch alone has no standard error.
  alone = TIMES | {'speedup_error': float('nan')}
  replayed = _record('T5 1.1 large', replay=0.82, walltime=alone)
  replayed['results']['workload'] |= {
    'target': 'T5 1.1 xxl',
    'random_weights': ['T5 1.1 xxl', 'T5 1.1 large'],
  }
  for name in ('table2', 'table3', 'table4', 'table5'):
    records.append(tmp_path / name / 'records.jsonl', _record(**rated))
  for name in ('table2', 'table4'):
    records.append(tmp_path / name / 'records.jsonl', replayed)
  trace = {
    'inputs': 'in', 'task': 'Debian En-De', 'target': 'one', 'draft': 'two',
    'temperature': 1.0, 'gamma': 3,
    'blocks': [[
      {'what': 'accepted', 'text': ' fast'},
      {'what': 'rejected', 'text': ' $wrong_'},
      {'what': 'unread', 'text': ' dropped'},
      {'what': 'correction', 'text': ' right'},
    ], [{'what': 'bonus', 'text': ' more'}]],
  }  # fmt: skip
  records.append(tmp_path / 'figure1/records.jsonl', _record(trace=trace))
  spans = [['target encoder', 0.0, 0.01], ['target', 0.01, 0.0347]]
  lines = [
    {'gamma': g, 'tokens': 9, 'target_calls': 4, 'seconds': 0.5, 'spans': spans}
    for g in (3, 0)
  ]
  records.append(
    tmp_path / 'figure5/records.jsonl', _record(timeline={'lines': lines})
  )
  return str(tmp_path)


def _row(rows, **wanted):
  (row,) = [r for r in rows if all(r.get(k) == v for k, v in wanted.items())]
  return row


def test_numbers_come_from_records(root):
  found = {path.parent.name: t for path, t in pages.expected(root).items()}
  small = [
    line for line in found['table4'].splitlines() if 'debian-small' in line
  ]
  assert len(small) == 1
  for number in (
    '0.432 ± 0.012',
    '1.23 ± 0.05',
    '0.079 ± 0.012',
    '1.41',
    '+26 %',
    '+3 %',
    '1.56',
    '1.27',
    '7 cores of Abacus',
    'scaled down',
    '3.2',
    '3.4',
  ):
    assert f'| {number} |' in small[0]  # fmt: skip
  assert '0.432 ± 0.012 | 9876 | 55' in found['table3']
  assert '0.654 ± 0.012' in found['table5']
  assert ' fast[- $wrong_-]( dropped){+ right+}' in found['figure1']
  assert '24.7' in found['figure5']
  assert 'from costs in 1 and Theorem 3.8 in 0 of our 1' in found['table4']


@pytest.mark.parametrize(
  'name, count',
  [('table2', 12), ('table3', 32), ('table4', 12), ('table5', 20)],
)
def test_every_published_row_has_a_row_of_ours_or_a_reason(root, name, count):
  rows = getattr(tables, name)(root)
  published = [r for r in rows if any(k.startswith('published') for k in r)]
  assert len(published) == count
  for row in published:
    measured = 'hardware' in row
    assert measured or row['status'].startswith('not run: ')
  assert sum('hardware' in row for row in published) >= 1


def test_what_was_simulated_says_so(root):
  row = _row(
    tables.table2(root), draft='T5-large', temperature=0.0, task='EnDe'
  )
  assert row['status'] == 'simulated: random weights, accepted at 0.82'
  assert row['alpha'] == 0.82
  small = _row(tables.table2(root), draft='T5-small', temperature=0.0,
               task='EnDe')  # fmt: skip
  assert small['status'] == 'scaled down'


def test_full_size_is_reproduced_only_near_the_published_value(root):
  names = {'draft': 'T5 1.1 small', 'target': 'T5 1.1 xxl', 'task': 'WMT En-De'}
  for alpha, status in ((0.76, 'reproduced: +1 %'), (0.11, 'differs: -85 %')):
    rate = RATE | {'by_lenience': [RATE['by_lenience'][0] | {'alpha': alpha}]}
    record = _record(acceptance_rate=rate)
    record['results']['workload'] |= names
    records.append(f'{root}/table3/records.jsonl', record)
    rows = [r for r in tables.table3(root) if r.get('alpha') == alpha]
    assert [row['status'] for row in rows] == [status]


def test_figures_of_a_simulation_say_so(root):
  record = records.read(f'{root}/figure1/records.jsonl')[-1]
  record['results']['workload']['replay'] = 0.5
  record['time'] = '2026-01-02T00:00:00+00:00'
  records.append(f'{root}/figure1/records.jsonl', record)
  found = {path.parent.name: t for path, t in pages.expected(root).items()}
  assert 'Status: simulated: accepted at 0.5' in found['figure1']
  assert '(figure1/README.md) | simulated' in pages.index(root)


def test_the_newest_record_counts(root):
  again = _record(acceptance_rate=RATE | {'by_lenience': [
    RATE['by_lenience'][0] | {'alpha': 0.9}]})  # fmt: skip
  records.append(f'{root}/table3/records.jsonl', again)
  row = _row(tables.table3(root), draft='T5-small', temperature=0.0,
             task='EnDe')  # fmt: skip
  assert row['alpha'] == 0.9


def test_theory_without_and_with_its_record(root):
  rows = tables.table1(root)
  assert {row['status'] for row in rows} == {'not run: not measured yet'}
  from spec_decode.measure import curves

  for name in curves.CURVES:
    results = {'curves': curves.measure('', name)}
    record = _record() | {'results': results}
    records.append(f'{root}/{name}/records.jsonl', record)
  rows = tables.table1(root)
  assert len(rows) == 6
  assert {row['status'] for row in rows} == {'reproduced'}
  pages.write(root)  # pictures of all of them
  assert pages.stale(root) == []


def test_stale_pages_are_named(root):
  assert len(pages.stale(root)) >= len(pages.PAGES)
  pages.write(root)
  assert pages.stale(root) == []
  records.append(
    f'{root}/table3/records.jsonl',
    _record('Bigram', acceptance_rate=RATE),
  )
  names = ('table3/README.md', 'README.md', 'table3/picture.png')
  assert pages.stale(root) == [f'{root}/{name}' for name in names]


def test_rows_of_several_machines_say_which():
  here = {'hardware': HARDWARE, 'versions': {'jax': '1.2'}}
  there = here | {'hardware': HARDWARE | {'cores': 9}}
  rows = [{'c': '0.1'}, {'c': '0.2'}, {'c': '0.3'}]
  where = '7 cores of Abacus, jax 1.2'
  assert tables.by_machine([here] * 3, rows) == (where, rows)
  both, marked = tables.by_machine([here, there, here], rows)
  assert both == f'A: {where}; B: 9 cores of Abacus, jax 1.2'
  assert [row['machine'] for row in marked] == ['A', 'B', 'A']
  assert [row['c'] for row in marked] == ['0.1', '0.2', '0.3']
