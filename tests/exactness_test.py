# SPDX-License-Identifier: Apache-2.0
"""The proof that users run: a good rule passes it, a broken one does not."""

import dataclasses
import io
import json

import numpy as np
import pytest
from scipy import stats
import sentencepiece
import tiny

from spec_decode.data import text
from spec_decode.measure import exactness
from spec_decode.report import console
from spec_decode.sampling import Sampling

SIZES = {
  'gammas': (2,),
  'batch_sizes': (2,),
  'padding': 5,
  'law_gammas': (2,),
  'num_prompts': 2,
  'num_samples': 600,
  'rows': 300,
}


def pair(tmp_path, **changes):
  """A target of four likely tokens; the draft guesses them and others.

  Texts are spelt in letters: so few ids make thousands of samples cheap.
  """
  source = tiny.examples(tmp_path / 'examples.jsonl')
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(source.read_text().splitlines()),
    model_writer=model, model_type='char', vocab_size=64,
    hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
    minloglevel=2,
  )  # fmt: skip
  letters = tmp_path / 'letters.model'
  letters.write_bytes(model.getvalue())
  network = dataclasses.replace(tiny.network(vocab_size=64), vocab_size=64)
  prompts = text.Prompts('letters', str(source), str(letters), 24)
  return tiny.make(
    tmp_path,
    target=network,
    draft=network,
    prompts=prompts,
    top_k=4,
    draft_sampling=Sampling(2.0, top_k=6),
    **changes,
  )


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  workload = pair(tmp_path_factory.mktemp('good'))
  return workload, exactness.measure(workload, '', **SIZES)


def test_a_good_pair(good):
  _, found = good
  settings = [(row['batch_size'], row['padding']) for row in found['ids']]
  assert settings == [(2, 0), (2, 5)]
  for row in found['ids']:
    assert (row['examples'], row['differing'], row['logit_gaps']) == (3, 0, [])
  assert [row['prompt'] for row in found['law']] == ['example 0', 'example 1']
  for row in found['law']:
    assert (row['n'], row['first_token']['degrees_of_freedom']) == (600, 3)
    assert row['all_tokens']['degrees_of_freedom'] > 5
    for test in ('first_token', 'all_tokens'):
      assert 1e-4 < row[test]['p_value'] < 1


def test_a_rule_that_accepts_everything(tmp_path):
  found = exactness.measure(pair(tmp_path, replay=1.0), '', **SIZES)
  for row in found['ids']:
    assert row['differing'] == len(row['logit_gaps']) > 0
    # Plain decoding's token is the target's best, so these are no ties.
    assert min(row['logit_gaps']) > 0
    assert max(row['logit_gaps']) > 1e-3
  for row in found['law']:
    for test in ('first_token', 'all_tokens'):
      assert row[test]['p_value'] < 1e-6


def test_samples_of_temperature_0_or_of_part_of_a_batch_are_refused(tmp_path):
  workload = pair(tmp_path)
  greedy = dataclasses.replace(workload, temperature=0.0)
  (problem,) = exactness.problems(greedy)
  assert 'temperature > 0' in problem and not exactness.problems(workload)
  (problem,) = exactness.problems(workload, num_samples=7, rows=5)
  assert 'multiple of rows, got 7 and 5' in problem


def test_the_record_is_json_and_the_tables_show_it(good, capsys, monkeypatch):
  workload, found = good
  assert json.loads(json.dumps(found)) == found
  monkeypatch.setenv('COLUMNS', '120')
  console.show(workload, {'exactness': found})
  shown = capsys.readouterr().out
  assert 'of 3 examples' in ' '.join(shown.split())
  lines = [line.replace('│', ' ').split() for line in shown.splitlines()]
  assert ['2', '0', '0'] in lines and ['2', '5', '0'] in lines
  for row in found['law']:
    assert f'{row["first_token"]["statistic"]:.1f} (3)' in shown
    assert f'{row["all_tokens"]["p_value"]:.2g}' in shown


def test_logit_gaps_are_those_of_the_first_difference(tmp_path):
  workload = pair(tmp_path)
  batch = list(workload.prompts.batches(2))[1]  # example 2, and to fill it up
  theirs = np.array([[5, 6, 7], [5, 6, 7]])
  ours = np.array([[5, 9, 1], [1, 6, 7]])
  logits = exactness._logits(
    workload.target.model, workload.params[0], batch.inputs, theirs
  )
  (gap,) = exactness.logit_gaps(workload, batch, ours, theirs)
  assert gap == pytest.approx(float(logits[0, 1, 6] - logits[0, 1, 9]))
  assert exactness.logit_gaps(workload, batch, theirs, theirs) == []


def test_chi_squared_equals_scipy():
  counts = np.array([[30, 1, 52, 9, 8], [41, 0, 33, 14, 12]])
  # The rare ones are a cell together, which depends on what is expected.
  one = exactness.chi_squared(counts[:1], np.array([39, 1, 41, 9.5, 9.5]))
  good = stats.chisquare([30, 52, 18], [39, 41, 20])
  assert one['statistic'] == pytest.approx(good.statistic)
  assert one['p_value'] == pytest.approx(good.pvalue, rel=1e-4)
  two = exactness.chi_squared(counts, counts.mean(axis=0))
  pooled = [[30, 52, 9, 8 + 1], [41, 33, 14, 12]]
  good = stats.chi2_contingency(pooled, correction=False)
  assert two['degrees_of_freedom'] == good.dof == 3
  assert two['statistic'] == pytest.approx(good.statistic)
  assert two['p_value'] == pytest.approx(good.pvalue, rel=1e-4)


def test_a_rest_that_expects_too_few_is_pooled_with_the_rarest():
  counts, expected = np.array([[60, 35, 5]]), np.array([58.0, 40.0, 2.0])
  one = exactness.chi_squared(counts, expected)
  assert one['degrees_of_freedom'] == 1
  assert one['statistic'] == pytest.approx(4 / 58 + 4 / 42)
  # Nothing is left to test where one outcome is all but certain.
  alone = exactness.chi_squared(np.array([[99, 1]]), np.array([99.0, 1.0]))
  assert alone['degrees_of_freedom'] == 0
  assert np.isnan(alone['p_value'])


def test_padding_behind_prompts_of_the_decoder():
  prompt = np.array([[0, 7, 8], [0, 9, 0]]), np.array([3, 2])
  batch = text.Batch(np.zeros((2, 1), int), np.arange(2), 2, prompt)
  padded = exactness._padded(batch, 4)
  assert padded.inputs.shape == (2, 5)
  assert padded.prompt[0].tolist() == [
    [0, 7, 8, 0, 0, 0, 0], [0, 9, 0, 0, 0, 0, 0],
  ]  # fmt: skip
  assert padded.prompt[1] is prompt[1]
