# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks: the same ids and tokens as from the files themselves."""

import json
import pathlib

import gin
import numpy as np
import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from spec_decode import configuration
from spec_decode import experiment
from spec_decode.data import prompts
from spec_decode.data import tasks
from spec_decode.data import text

SHIPPED = text.ASSETS / 'debian'
VOCABULARY = str(SHIPPED / 'vocab.model')


def tokens(vocabulary, texts):
  return [ids + [text.Vocabulary.eos_id] for ids in vocabulary.encode(texts)]


@pytest.fixture
def train_dir(tmp_path):
  """A directory with one training pair per task, registered meanwhile."""
  for stem in ('en_de', 'synopsis'):
    pair = {'id': f'{stem}:7', 'inputs': 'translate: a', 'targets': 'ä'}
    path = tmp_path / f'train_{stem}.jsonl'
    path.write_text(json.dumps(pair) + '\n', encoding='utf-8')
  tasks.register_debian(train_dir=str(tmp_path))
  yield tmp_path
  tasks.register_debian()


@pytest.mark.parametrize('stem', ['en_de', 'synopsis'])
def test_shipped_sets_are_those_of_the_files(stem):
  examples = prompts.from_task(f'debian_{stem}')
  expected = text.read(SHIPPED / f'{stem}_test.jsonl')
  assert len(examples) == len(expected) == 1000
  for field in ('id', 'inputs', 'targets'):
    assert [getattr(e, field) for e in examples] == [
      getattr(e, field) for e in expected
    ]
  vocabulary = text.Vocabulary()
  for field, made in (('inputs', 'input_ids'), ('targets', 'target_ids')):
    ids = tokens(vocabulary, [getattr(e, field) for e in expected])
    np.testing.assert_array_equal(
      text.pad([getattr(e, made) for e in examples], 450), text.pad(ids, 450)
    )


def test_batches_of_a_task_are_those_of_its_file():
  path = str(SHIPPED / 'en_de_test.jsonl')
  read = lambda: prompts.from_task('debian_en_de', num_examples=10)
  sides = [
    text.Prompts('en_de', source, num_examples=10, input_length=256)
    for source in (path, read)
  ]
  assert not sides[1].problems()
  for ours, theirs in zip(*(side.batches(4) for side in sides), strict=True):
    np.testing.assert_array_equal(ours.inputs, theirs.inputs)
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    assert ours.count == theirs.count


def test_cut_ids_end_in_eos_as_those_of_the_file_do():
  examples = prompts.from_task(
    'debian_en_de', num_examples=20, sequence_length={'inputs': 16}
  )
  path = str(SHIPPED / 'en_de_test.jsonl')
  side = text.Prompts('en_de', path, None, 16, 20, truncate=True)
  (batch,) = side.batches(20)
  made = text.pad([e.input_ids for e in examples], 16)
  np.testing.assert_array_equal(made, batch.inputs)
  assert any(len(e.input_ids) == 16 for e in examples)


def test_training_files_are_a_split(train_dir):
  (example,) = prompts.from_task('debian_en_de', 'train')
  assert (example.id, example.inputs) == ('en_de:7', 'translate: a')
  (train_dir / 'train_en_de.jsonl').unlink()
  with pytest.raises(FileNotFoundError, match='train_en_de.jsonl is no file'):
    prompts.from_task('debian_en_de', 'train')


def test_batches_for_training_come_from_seqio_itself(train_dir):
  dataset = seqio.get_dataset(
    'debian_synopsis',
    {'inputs': 16, 'targets': 8},
    seqio.EncDecFeatureConverter(pack=False),
    shuffle=True,
    seed=0,
  )
  (row,) = dataset.as_numpy_iterator()
  inputs = tokens(text.Vocabulary(), ['translate: a'])
  np.testing.assert_array_equal(
    row['encoder_input_tokens'], text.pad(inputs, 16)[0]
  )


def test_a_training_split_that_is_not_there_says_how_to_make_it():
  with pytest.raises(FileNotFoundError) as error:
    prompts.from_task('debian_synopsis', 'train')
  for part in ("'debian_synopsis'", 'prepare_debian.py', 'register_debian'):
    assert part in str(error.value)


@pytest.mark.parametrize(
  'name', ['wmt_t2t_ende_v003', 'cnn_dailymail_v002', 'lm1b']
)
def test_tasks_of_the_paper_have_names_and_read_only_from_disk(name, tmp_path):
  assert tasks.get(name).name == name
  with pytest.raises(FileNotFoundError) as error:
    prompts.from_task(name, data_dir=str(tmp_path), vocabulary=VOCABULARY)
  for part in (name, str(tmp_path), 'tfds build', 'data.text.read'):
    assert part in str(error.value)


def store(data_dir, path, texts):
  """Writes a TFDS data set with one split, test, of text fields only."""
  directory = data_dir / path
  directory.mkdir(parents=True)
  features = tfds.features.FeaturesDict(
    dict.fromkeys(texts[0], tfds.features.Text())
  )
  name, *_, version = path.split('/')
  template = tfds.core.ShardedFileTemplate(
    directory, dataset_name=name, filetype_suffix='tfrecord'
  )
  file = f'{name}-test.tfrecord-00000-of-00001'
  with tf.io.TFRecordWriter(str(directory / file)) as writer:
    for row in texts:
      encoded = features.encode_example(row)
      writer.write(features.serialize_example(encoded))
  tfds.folder_dataset.write_metadata(
    data_dir=directory,
    features=features,
    split_infos=[
      tfds.core.SplitInfo(
        name='test',
        shard_lengths=[len(texts)],
        num_bytes=0,
        filename_template=template,
      )
    ],
    version=version,
  )


ARTICLE = ('article', 'highlights', 'id', 'publisher')


def test_translations_of_the_paper(tmp_path):
  rows = [{'de': 'Hallo', 'en': 'Hello'}]
  store(tmp_path, 'wmt_t2t_translate/de-en/1.0.0', rows)
  (example,) = prompts.from_task(
    'wmt_t2t_ende_v003', 'test', data_dir=str(tmp_path), vocabulary=VOCABULARY
  )
  assert example.inputs == 'translate English to German: Hello'
  assert example.targets == 'Hallo'


def test_summaries_of_the_paper(tmp_path):
  rows = [{key: f'{key} {i}' for key in ARTICLE} for i in range(3)]
  store(tmp_path, 'cnn_dailymail/3.4.0', rows)
  examples = prompts.from_task(
    'cnn_dailymail_v002', 'test', 2, None, str(tmp_path), VOCABULARY
  )
  assert [e.inputs for e in examples] == [
    'summarize: article 0',
    'summarize: article 1',
  ]
  assert examples[1].targets == 'highlights 1'
  assert examples[1].id == 'cnn_dailymail_v002:test:1'
  ids = tokens(text.Vocabulary(), [e.inputs for e in examples])
  for example, expected in zip(examples, ids, strict=True):
    assert example.input_ids.tolist() == expected


def test_sentences_of_the_paper_have_targets_only(tmp_path):
  rows = [{'text': f'This is sentence {i} .'} for i in range(3)]
  store(tmp_path, 'lm1b/1.1.0', rows)
  examples = prompts.from_task('lm1b', 'test', data_dir=str(tmp_path))
  assert [e.targets for e in examples] == [row['text'] for row in rows]
  assert [e.inputs for e in examples] == [''] * 3
  ids = tokens(text.Vocabulary(), [rows[2]['text']])
  assert examples[2].target_ids.tolist() == ids[0]


def test_sentences_of_the_paper_begin_what_is_generated(tmp_path):
  rows = [{'text': f'This is sentence {i} .'} for i in range(3)]
  store(tmp_path, 'lm1b/1.1.0', rows)
  side = text.Prompts(
    'LM1B',
    lambda: prompts.from_task('lm1b', 'test', data_dir=str(tmp_path)),
    input_length=2,
    truncate=True,
    continued='targets',
  )
  assert not side.problems()
  (batch,) = side.batches(3)
  expected = [[0, *ids[:2]] for ids in tokens(text.Vocabulary(), ['This is'])]
  assert batch.prompt[0].tolist() == expected * 3
  assert len(set(batch.ids.tolist())) == 3


@pytest.mark.parametrize(
  'files, bindings',
  [
    (['runs/lm1b'], []),
    (['runs/train_lm1b', 'models/lm1b_97m'], ['NETWORK = %TARGET']),
    (['runs/train_lm1b', 'models/lm1b_6m_draft'], ['NETWORK = %DRAFT']),
  ],
  ids=['run', 'target', 'draft'],
)
def test_configs_of_sentences_have_no_idle_binding(
  files, bindings, monkeypatch
):
  monkeypatch.chdir(text.ASSETS.parents[1])
  gin.clear_config()
  configuration.parse(
    [f'configs/{name}.gin' for name in files],
    [*bindings, "OUTPUT_DIR = 'x'"],
    ['.'],
  )
  assert configuration.unreachable_bindings(experiment.run) == []
  gin.clear_config()


def test_a_vocabulary_that_is_not_on_disk_is_not_looked_for(tmp_path):
  store(tmp_path, 'cnn_dailymail/3.4.0', [dict.fromkeys(ARTICLE, '')])
  read = lambda path: prompts.from_task(
    'cnn_dailymail_v002', 'test', data_dir=str(tmp_path), vocabulary=path
  )
  with pytest.raises(FileNotFoundError, match='cc_all.32000.* not on disk'):
    read(None)
  with pytest.raises(FileNotFoundError, match='nowhere.model is no file'):
    read(str(tmp_path / 'nowhere.model'))


def test_tasks_of_a_mixture_come_one_after_another():
  name = 'debian_both'
  seqio.MixtureRegistry.add(name, list(tasks.DEBIAN), default_rate=1)
  try:
    examples = prompts.from_task(name, num_examples=2)
  finally:
    seqio.MixtureRegistry.remove(name)
  expected = [
    *text.read(SHIPPED / 'en_de_test.jsonl')[:2],
    *text.read(SHIPPED / 'synopsis_test.jsonl')[:2],
  ]
  assert [e.id for e in examples] == [e.id for e in expected]


def test_bad_names_are_met_with_near_ones():
  with pytest.raises(ValueError, match='Near it are.*debian_en_de'):
    tasks.get('debian_ende')
  with pytest.raises(ValueError, match='It has train, validation'):
    prompts.from_task('debian_en_de', 'test')


def test_tensorflow_gets_no_accelerator(monkeypatch):
  hidden = []
  monkeypatch.setattr(
    tf.config,
    'set_visible_devices',
    lambda devices, kind: hidden.append((devices, kind)),
  )
  prompts.from_task('debian_en_de', num_examples=1)
  assert hidden == [([], 'GPU'), ([], 'TPU')]


def test_rows_of_the_full_size_tables_have_no_idle_binding(monkeypatch):
  import gin

  from spec_decode import configuration
  from spec_decode import experiment

  monkeypatch.chdir(pathlib.Path(__file__).parents[1])
  gin.clear_config()
  configuration.parse(['configs/runs/tables_t5.gin'], [], ['.'])
  rows = gin.query_parameter('experiment.sweep.rows')
  plan = [row for group in rows for row in group.scoped_configurable_fn()]
  # 6 pages, 12 rows of table 2, 8 more of table 3, 6 without an encoder.
  assert len(plan) == 32
  for files, bindings in plan:
    experiment._configured(files, bindings, ['.'])
    assert configuration.unreachable_bindings(experiment.run) == []
  gin.clear_config()
