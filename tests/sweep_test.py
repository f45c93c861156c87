# SPDX-License-Identifier: Apache-2.0
"""Sweeps: every combination is a row, measured once; all tables parse."""

import hashlib
import json
import pathlib
import shutil

import experiment_test
import gin
import numpy as np
import pytest
import tiny

from spec_decode import configuration
from spec_decode import draft_sources
from spec_decode import experiment
from spec_decode import records
from spec_decode.data import text
from spec_decode.models import ngram
from spec_decode.sampling import Sampling

ROOT = pathlib.Path(__file__).parent.parent
THEORY = 'configs/runs/theory.gin'


@pytest.fixture(autouse=True)
def _fresh_gin(monkeypatch):
  monkeypatch.chdir(ROOT)
  gin.clear_config()
  yield
  gin.clear_config()


def _rows(tmp_path, *names, folders=('table1',)):
  return experiment.Rows(
    files=THEORY,
    choices=(tuple(f"CURVES = '{name}'" for name in names),),
    values={'OUTPUT_DIR': str(tmp_path / 'out')},
    folders=folders,
  )


def test_every_combination_is_a_row():
  rows = experiment.Rows(
    files=('a.gin', ('b.gin', 'N = 1')),
    choices=(('T = 0', 'T = 1'), ('c.gin', ('d.gin', ('G = 7',)))),
    values={'M': 'word'},
    folders=(),
  )
  assert list(rows) == [
    (['a.gin', 'b.gin', 'c.gin'], ["M = 'word'", 'N = 1', 'T = 0']),
    (['a.gin', 'b.gin', 'd.gin'], ["M = 'word'", 'N = 1', 'T = 0', 'G = 7']),
    (['a.gin', 'b.gin', 'c.gin'], ["M = 'word'", 'N = 1', 'T = 1']),
    (['a.gin', 'b.gin', 'd.gin'], ["M = 'word'", 'N = 1', 'T = 1', 'G = 7']),
  ]


def test_what_has_a_record_is_not_run_again(tmp_path):
  done, root = [], str(tmp_path)
  path = tmp_path / 'table1' / 'records.jsonl'
  rows = _rows(tmp_path, 'table1', 'figure3')
  experiment.sweep([rows], root, done.append)
  before = path.read_text()
  assert before.count('\n') == 2 and done == [root]
  experiment.sweep([rows], root, done.append)
  assert path.read_text() == before
  # Another folder gets the same records, and another choice a new one.
  more = _rows(tmp_path, 'table1', 'figure2', folders=('table1', 'second'))
  experiment.sweep([more], root)
  second = (tmp_path / 'second' / 'records.jsonl').read_text()
  assert path.read_text() == before + second.splitlines()[1] + '\n'
  assert second.splitlines()[0] == before.splitlines()[0]


def test_all_rows_are_checked_before_the_first_runs(tmp_path):
  good = _rows(tmp_path, 'table1')
  bad = [
    experiment.Rows(files=THEORY, choices=('CURVE = 1',), folders=('t',)),
    experiment.Rows(files='configs/runs/nowhere.gin', folders=('t',)),
  ]
  with pytest.raises(configuration.ConfigError) as error:
    experiment.sweep([good, *bad], str(tmp_path))
  assert 'Did you mean CURVES' in str(error.value)
  assert 'nowhere.gin' in str(error.value)
  assert not (tmp_path / 'table1').exists()


def test_other_weights_are_another_row(tmp_path):
  keys = []
  for content in (b'one', b'two', b'one'):
    path = tmp_path / 'weights'
    path.write_bytes(content)
    configuration.parse(['configs/runs/quickstart.gin'], [], ['.'])
    workload = tiny.make(
      tmp_path, draft=draft_sources.NGrams('n', str(path), 9)
    )
    keys.append(experiment._key(experiment._weights(workload)))
    gin.clear_config()
  assert keys[0] == keys[2] != keys[1]


def test_weights_are_known_by_role_and_by_all_files_of_a_folder(tmp_path):
  folder = tmp_path / 'checkpoint'
  (folder / 'inner').mkdir(parents=True)
  (folder / 'inner' / 'array').write_bytes(b'one')
  single = tmp_path / 'weights'
  single.write_bytes(b'two')
  networks = [tiny.network(checkpoint=str(p)) for p in (folder, single)]
  workload = tiny.make(tmp_path, target=networks[0], draft=networks[1])
  before = experiment._weights(workload)
  assert set(before) == {'target', 'draft'}
  assert before['draft'] == hashlib.sha256(b'two').hexdigest()
  (folder / 'inner' / 'array').write_bytes(b'other')
  after = experiment._weights(workload)
  assert after['target'] != before['target']
  assert after['draft'] == before['draft']


def test_a_sweep_finds_its_rows_on_the_search_path(tmp_path, monkeypatch):
  (tmp_path / 'conf').mkdir()
  shutil.copy(ROOT / THEORY, tmp_path / 'conf' / 'row.gin')
  (tmp_path / 'conf' / 'all.gin').write_text(f"""
from __gin__ import dynamic_registration
from spec_decode import experiment
experiment.sweep:
  rows = (@experiment.Rows(),)
  experiments = '{tmp_path}'
experiment.Rows:
  files = 'row.gin'
  choices = ("CURVES = 'table1'",)
  folders = ('table1',)
""")
  monkeypatch.chdir(tmp_path)
  paths = ['conf']
  configuration.parse(['all.gin'], [], paths)
  experiment.main(paths)
  assert len(records.read('table1/records.jsonl')) == 1


@pytest.mark.parametrize(
  'name, count',
  [('tables', 42), ('tables_replayed', 12), ('tables_replayed_base', 3)],
)
def test_rows_of_the_shipped_tables_have_nothing_to_correct(name, count):
  configuration.parse([f'configs/runs/{name}.gin'], [], ['.'])
  rows = gin.query_parameter('experiment.sweep.rows')
  plan = [row for group in rows for row in group.scoped_configurable_fn()]
  assert len(plan) == len({str(row) for row in plan})
  assert len(plan) == count
  for files, bindings in plan:
    experiment._configured(files, bindings, ['.'])(only_check=True)


@pytest.mark.parametrize(
  'path', experiment_test.NO_NETWORKS, ids=lambda path: path.stem
)
def test_drafts_without_a_network_fit_the_vocabulary(path):
  gin.parse_config_file(str(path))
  source = gin.query_parameter('DRAFT/gin.macro.value').scoped_configurable_fn()
  assert source.problems(text.Vocabulary()) == []
  draft = source.as_draft(2, Sampling())
  assert draft.gamma == 2 and draft.vocab_size == text.Vocabulary().size


def test_tables_are_counted_with_the_extra_ids_of_a_vocabulary(tmp_path):
  path = tiny.examples(tmp_path / 'a.jsonl', 4)
  draft_sources.count(str(tmp_path), str(path), extra_ids=100)
  vocabulary = text.Vocabulary(extra_ids=100)
  counted = str(tmp_path / 'ngrams.safetensors')
  source = draft_sources.NGrams('n', counted, vocabulary.size)
  assert source.problems(vocabulary) == []
  (problem,) = source.problems(text.Vocabulary())
  assert 'counted with' in problem
  assert source.load()['unigram'].shape[-1] == vocabulary.size


def test_counted_tables_are_loaded_to_their_order(tmp_path):
  source = tmp_path / 'texts.jsonl'
  lines = [{'inputs': 'x', 'targets': 'small tools for small tools'}] * 3
  source.write_text('\n'.join(map(json.dumps, lines)))
  draft_sources.count(str(tmp_path), str(source), order=3)
  path = str(tmp_path / 'ngrams.safetensors')
  vocabulary = text.Vocabulary()
  size = vocabulary.size
  for order in (1, 2, 3):
    found = draft_sources.NGrams('n', path, size, order)
    assert found.problems(vocabulary) == []
    assert ngram.context_length(found.load()) == order - 1
  ids = vocabulary.encode(['small tools for small tools'])[0]
  bigrams = draft_sources.NGrams('n', path, size, 2).load()
  q = ngram.probabilities(bigrams, np.array([ids[0]]))
  assert int(np.argmax(q)) == ids[1]
  (problem,) = draft_sources.NGrams('n', path, size, 4).problems(vocabulary)
  assert 'order in 1..3' in problem
  missing = draft_sources.NGrams('n', 'nowhere', size)
  assert 'nowhere' in missing.problems(vocabulary)[0]
