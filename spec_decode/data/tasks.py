# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks by name: the shipped sets, and those of the paper.

  debian_en_de, debian_synopsis   shipped, registered by importing this module
  wmt_t2t_ende_v003               T5's own (section 4.1: English to German)
  cnn_dailymail_v002              T5's own (section 4.1: summarization)
  lm1b                            TFDS (section 4.2: language modelling)

Those of the paper are registered by the first `get` of them, and read from
disk only. This module and `prompts.py` alone import TensorFlow.
"""

import difflib
import functools
import importlib
import pathlib

import numpy as np
import seqio
import tensorflow as tf

from spec_decode.data import text

DEBIAN = ('debian_en_de', 'debian_synopsis')
LM1B = 'lm1b'
FIRST = 'validation_64'  # the first 64 examples
_AFTER_TOKENIZING = (
  seqio.CacheDatasetPlaceholder(),
  seqio.preprocessors.append_eos_after_trim,
)


def get(name: str) -> seqio.Task | seqio.Mixture:
  """The task or mixture of a name, registered if need be.

  Raises:
    ValueError: there is none of that name.
  """
  if name == LM1B and name not in _names():
    register_lm1b()
  hint = '' if name in _names() else _register_t5()
  if name in _names():
    return seqio.get_mixture_or_task(name)
  near = difflib.get_close_matches(name, _names(), n=3, cutoff=0.4)
  raise ValueError(
    f'Expected the name of a SeqIO task or mixture, got {name!r}. Near it are'
    f' {", ".join(near) or "none"}. A task of your own must be imported'
    f' before it is named.{hint}'
  )


def _names() -> set[str]:
  return {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}


def _register_t5() -> str:
  """Registers all of T5's tasks and mixtures; returns why it could not."""
  try:
    # Seconds, and a package that the shipped sets do without.
    importlib.import_module('t5.data.tasks')
    importlib.import_module('t5.data.mixtures')
  except ImportError as error:
    return f' Tasks of T5 need `pip install t5` ({error}).'
  return ''


def register_debian(train_dir: str | None = None) -> None:
  """Registers the two Debian tasks; called again, it replaces them.

  Their validation split is the test set that is shipped, and `FIRST` its start.

  Args:
    train_dir: has train_en_de.jsonl and train_synopsis.jsonl, the train splits.
  """
  vocabulary = shipped_vocabulary()
  for name in DEBIAN:
    stem = name.removeprefix('debian_')
    shipped = text.ASSETS / 'debian' / f'{stem}_test.jsonl'
    files = {'validation': shipped, FIRST: shipped}
    if train_dir is not None:
      directory = pathlib.Path(train_dir).expanduser()
      files['train'] = directory / f'train_{stem}.jsonl'
    _replace(
      name,
      source=seqio.FunctionDataSource(
        functools.partial(_read, name, files),
        splits=('train', 'validation', FIRST),
      ),
      preprocessors=(_tokenize, *_AFTER_TOKENIZING),
      output_features={
        'inputs': seqio.Feature(vocabulary, add_eos=True),
        'targets': seqio.Feature(vocabulary, add_eos=True),
      },
      # The whole set, since the files are in the order of the archive.
      shuffle_buffer_size=100_000,
    )


def register_lm1b(
  vocabulary: seqio.Vocabulary | None = None, data_dir: str | None = None
) -> None:
  """Registers LM1B, targets only; called again, it replaces the task.

  Args:
    vocabulary: None for the shipped one, of as many pieces as the paper's word
      pieces but made of other text.
    data_dir: of TFDS; None for its own default.
  """
  vocabulary = vocabulary or shipped_vocabulary()
  rekey = functools.partial(
    seqio.preprocessors.rekey, key_map={'targets': 'text'}
  )
  _replace(
    LM1B,
    source=seqio.TfdsDataSource(
      'lm1b:1.1.0', tfds_data_dir=data_dir, splits=('train', 'test')
    ),
    preprocessors=(
      rekey,
      seqio.preprocessors.tokenize,
      *_AFTER_TOKENIZING,
    ),
    output_features={'targets': seqio.Feature(vocabulary, add_eos=True)},
  )


def shipped_vocabulary() -> seqio.SentencePieceVocabulary:
  """That of the shipped networks."""
  return seqio.SentencePieceVocabulary(
    str(text.ASSETS / 'debian' / 'vocab.model')
  )


def _replace(name: str, **task) -> None:
  seqio.TaskRegistry.remove(name)
  seqio.TaskRegistry.add(name, **task)


def _read(name, files, split, shuffle_files, seed=None) -> tf.data.Dataset:
  """Examples of one split, with the ids and texts of `text.read`."""
  del shuffle_files, seed  # the task shuffles
  path = files.get(split)
  if path is None or not path.is_file():
    where = 'no directory was given' if path is None else f'{path} is no file'
    raise FileNotFoundError(
      f'Split {split!r} of task {name!r} is not on disk: {where}. `python'
      ' scripts/prepare_debian.py --output_dir=DIR` makes it, and'
      ' `tasks.register_debian(train_dir=DIR)` tells where it is.'
    )
  examples = text.read(path)[: 64 if split == FIRST else None]
  return tf.data.Dataset.from_tensor_slices(
    {
      field: [getattr(example, field) for example in examples]
      for field in ('id', 'inputs', 'targets')
    }
  )


def _tokenize(dataset: tf.data.Dataset, output_features) -> tf.data.Dataset:
  """`seqio.preprocessors.tokenize` by the library that `text` uses.

  TensorFlow Text has its own copy, which breaks ties between segmentations of
  equal probability ("9" "99" or "99" "9") the other way.
  """

  def tokenize(example):
    made = dict(example)
    for key, feature in output_features.items():
      encode = lambda x, vocabulary=feature.vocabulary: np.array(
        vocabulary.encode(x.decode()), np.int32
      )
      ids = tf.numpy_function(encode, [example[key]], tf.int32, stateful=False)
      made[key] = tf.ensure_shape(ids, [None])
      made[f'{key}_pretokenized'] = example[key]
    return made

  return dataset.map(tokenize)


register_debian()
