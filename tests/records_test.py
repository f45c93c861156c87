# SPDX-License-Identifier: Apache-2.0
"""Records are written whole and read back as they were."""

import pytest

from spec_decode import records


def test_records_accumulate_in_order(tmp_path):
  path = tmp_path / 'new folder' / 'records.jsonl'
  for i in range(3):
    records.append(path, records.stamp('run', f'x = {i}', {'value': i}))
  found = records.read(path)
  assert [r['results']['value'] for r in found] == [0, 1, 2]
  assert [r['config'] for r in found] == ['x = 0', 'x = 1', 'x = 2']
  for record in found:
    assert record['hardware']['device']
    assert record['versions']['jax']


def test_what_is_no_number_is_null_for_every_reader(tmp_path):
  path = tmp_path / 'records.jsonl'
  rows = [{'error': float('nan')}, {'ratio': (float('inf'), 0.5)}]
  records.append(path, {'rows': rows, 'count': 0, 'flag': False})
  assert path.read_text() == (
    '{"rows": [{"error": null}, {"ratio": [null, 0.5]}], "count": 0,'
    ' "flag": false}\n'
  )


def test_a_broken_line_is_named(tmp_path):
  path = tmp_path / 'records.jsonl'
  path.write_text('{}\n{"name": "cut o')
  with pytest.raises(ValueError, match='line 2'):
    records.read(path)


def test_processors_of_one_name_are_told_apart(tmp_path):
  cpuinfo = tmp_path / 'cpuinfo'
  cpuinfo.write_text(
    'cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n'
    '\ncpu family\t: 99\n'
  )
  name = 'AMD EPYC (family 25, model 17)'
  assert records._processor(cpuinfo) == name
  cpuinfo.write_text('model name\t: ARMv7\n')
  assert records._processor(cpuinfo) == 'ARMv7'
  assert records._processor(tmp_path / 'none')
