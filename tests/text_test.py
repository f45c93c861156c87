# SPDX-License-Identifier: Apache-2.0
"""Reading, batching and bucketing of plain files."""

import collections
import itertools
import json

import numpy as np
import pytest
import tiny

from spec_decode.data import text
from spec_decode.data import training


def test_jsonl_and_tsv_give_the_same_examples(tmp_path):
  (tmp_path / 'a.jsonl').write_text(
    '{"inputs": "eins", "targets": "one"}\n\n{"inputs": "zwei"}\n'
  )
  (tmp_path / 'a.tsv').write_text('eins\tone\nzwei\n')
  expected = [('eins', 'one'), ('zwei', '')]
  for name in ('a.jsonl', 'a.tsv'):
    found = text.read(str(tmp_path / name))
    assert [(e.inputs, e.targets) for e in found] == expected


def test_another_field_can_be_the_targets(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"inputs": "x", "targets": "y", "prediction": "z"}\n')
  assert text.read(str(path), 'prediction')[0].targets == 'z'


@pytest.mark.parametrize(
  'name, content, message',
  [
    ('a.jsonl', '{"inputs": "x"}\nnot json\n', 'line 2'),
    ('a.jsonl', '{"targets": "x"}\n', '"inputs"'),
    ('a.jsonl', '[1]\n', 'line 1'),
    ('a.tsv', 'a\tb\tc\n', '3 fields'),
    ('a.jsonl', '\n', 'at least one example'),
  ],
)
def test_bad_files_are_refused_with_their_place(
  tmp_path, name, content, message
):
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=message):
    text.read(str(tmp_path / name))


def test_a_missing_file_names_the_shipped_one_of_that_name():
  with pytest.raises(FileNotFoundError, match='assets/debian/en_de_test.jsonl'):
    text.read('elsewhere/en_de_test.jsonl')


def test_batches_keep_order_and_mark_filling_rows(tmp_path):
  prompts = text.Prompts(
    'tiny', str(tiny.examples(tmp_path / 'a.jsonl', 5)), input_length=32
  )
  batches = list(prompts.batches(2))
  assert [batch.count for batch in batches] == [2, 2, 1]
  ids = np.concatenate([b.ids[: b.count] for b in batches])
  assert ids.tolist() == [text.example_key(f'example {i}') for i in range(5)]
  lengths = [int(np.sum(b.inputs[0] > 0)) for b in batches]
  assert lengths == sorted(lengths)
  for batch in batches:
    for row in batch.inputs:
      assert row[row > 0][-1] == text.Vocabulary.eos_id


def test_batches_are_as_wide_as_the_longest_input_rounded_up(tmp_path):
  path = str(tiny.examples(tmp_path / 'a.jsonl', 5))
  batches = list(text.Prompts('tiny', path, input_length=64).batches(2))
  longest = max(int(np.sum(row > 0)) for b in batches for row in b.inputs)
  width = batches[0].inputs.shape[1]
  assert width % 16 == 0 and width - 16 < longest <= width < 64
  assert {b.inputs.shape for b in batches} == {(2, width)}
  cap = text.Prompts('tiny', path, input_length=longest + 1)
  assert next(cap.batches(1)).inputs.shape == (1, min(width, longest + 1))


def test_long_inputs_are_refused_or_cut_with_an_end(tmp_path):
  path = str(tiny.examples(tmp_path / 'a.jsonl', 5))
  (problem,) = text.Prompts('tiny', path, input_length=12).problems()
  assert 'truncate' in problem and "'example " in problem
  cut = text.Prompts('tiny', path, input_length=12, truncate=True)
  assert cut.problems() == []
  (batch,) = cut.batches(5)
  assert batch.inputs[-1, -1] == text.Vocabulary.eos_id


def test_empty_inputs_are_refused(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"inputs": " ", "id": "blank"}\n{"inputs": "x"}\n')
  (problem,) = text.Prompts('t', str(path)).problems()
  assert 'blank' in problem


def test_vocabularies_are_compared_by_content():
  one, other = text.Vocabulary(), text.Vocabulary(extra_ids=100)
  assert one.size + 100 == other.size
  assert one.fingerprint != other.fingerprint
  assert one.fingerprint == text.Vocabulary(one.path).fingerprint


def test_decoding_stops_at_the_end_and_skips_padding():
  vocabulary = text.Vocabulary()
  (ids,) = vocabulary.encode(['Ein kleines Werkzeug'])
  padded = [0, *ids, 8050, vocabulary.eos_id, *ids]
  assert vocabulary.decode(padded) == 'Ein kleines Werkzeug'


def _buckets(tmp_path, **changes):
  sources = (
    training.Source(str(tiny.examples(tmp_path / 'a.jsonl', 9))),
    training.Source(str(tiny.examples(tmp_path / 'b.jsonl', 4)), weight=0.5),
  )
  settings = dict(
    sources=sources,
    vocabulary=text.Vocabulary(),
    buckets=((16, 8), (48, 48)),
    tokens_per_batch=48,
  )
  return training.BucketedBatches(**(settings | changes))


def test_training_batches_resume_where_they_stopped(tmp_path):
  buckets = _buckets(tmp_path)
  whole = list(itertools.islice(buckets.from_step(0), 9))
  for start in (1, 4, 7):
    rest = itertools.islice(buckets.from_step(start), 9 - start)
    for old, new in zip(whole[start:], rest):
      np.testing.assert_array_equal(old['inputs'], new['inputs'])
      np.testing.assert_array_equal(old['targets'], new['targets'])


def test_ids_that_a_model_wrote_are_trained_on_as_they_are(tmp_path):
  path = tmp_path / 'written.jsonl'
  written = [[9, 8, 7, 1], [6, 5, 4]]  # the second was cut off: no EOS
  path.write_text(
    ''.join(json.dumps({'inputs': 'a', 'tokens': y}) + '\n' for y in written)
  )
  sources = (
    (training.Source(str(path), targets='tokens'), (4, 4)),
    (training.Source(lambda: text.plain(str(path), 'tokens')), (1, 4)),
  )
  for source, bucket in sources:
    buckets = _buckets(
      tmp_path, sources=(source,), buckets=(bucket,), tokens_per_batch=8
    )
    batch = next(buckets.from_step(0))
    assert sorted(batch['targets'].tolist()) == [[6, 5, 4, 0], [9, 8, 7, 1]]
    assert batch['inputs'].shape == (2, bucket[0])


def test_examples_without_targets_are_not_trained_on(tmp_path):
  path = tmp_path / 'written.jsonl'
  rows = [{'id': 'a', 'tokens': [3, 1]}, {'id': 'b', 'token': [4, 1]}]
  path.write_text(''.join(json.dumps({'inputs': 'x'} | r) + '\n' for r in rows))
  source = training.Source(str(path), targets='tokens')
  buckets = _buckets(tmp_path, sources=(source,))
  with pytest.raises(ValueError, match="all 2 examples, got 1 .*'b'"):
    next(buckets.from_step(0))


def test_an_epoch_holds_each_source_by_its_weight(tmp_path):
  buckets = _buckets(tmp_path, tokens_per_batch=1)  # batches of one
  seen = collections.Counter(
    tuple(pairs[0][0]) for _, pairs in buckets._epoch(0)
  )
  # 9 examples once, and half of 4 that equal the first ones.
  assert sum(seen.values()) == 11
  assert sorted(seen.values()) == [1] * 7 + [2] * 2


def test_a_source_of_weight_0_is_off_and_of_2_comes_twice(tmp_path):
  path = str(tiny.examples(tmp_path / 'a.jsonl', 9))
  for weight, expected in ((0.0, 4), (2.0, 22)):
    sources = (
      training.Source(path, weight),
      training.Source(str(tiny.examples(tmp_path / 'b.jsonl', 4))),
    )
    buckets = _buckets(tmp_path, sources=sources, tokens_per_batch=1)
    assert len(buckets._epoch(0)) == expected


def test_too_long_pairs_are_counted_not_cut(tmp_path):
  buckets = _buckets(tmp_path, buckets=((16, 8),))
  long = [
    json.loads(line)
    for name in ('a.jsonl', 'b.jsonl')
    for line in (tmp_path / name).read_text().splitlines()
  ]
  vocabulary = text.Vocabulary()
  expected = sum(
    len(vocabulary.encode([e['inputs']])[0]) + 1 > 16
    or len(vocabulary.encode([e['targets']])[0]) + 1 > 8
    for e in long
  )
  assert 0 < buckets.left_out == expected


def test_no_full_batch_is_an_error(tmp_path):
  buckets = _buckets(tmp_path, buckets=((2, 2),))
  with pytest.raises(ValueError, match='tokens_per_batch'):
    next(buckets.from_step(0))
