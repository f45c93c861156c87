# SPDX-License-Identifier: Apache-2.0
"""A SeqIO task -> examples in NumPy, as `text.read` gives them from a file."""

from collections.abc import Mapping
import dataclasses
import itertools
import os
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from spec_decode.data import tasks
from spec_decode.data import text


@dataclasses.dataclass(frozen=True)
class TokenizedExample(text.Example):
  """An example with the ids that the task itself makes of it.

  The ids end in EOS if the task's features do, and are not padded.
  """

  input_ids: np.ndarray = dataclasses.field(  # int32 [inputs]
    default=None, compare=False, repr=False
  )
  target_ids: np.ndarray = dataclasses.field(  # int32 [targets]
    default=None, compare=False, repr=False
  )


def from_task(
  name: str,
  split: str = 'validation',
  num_examples: int | None = None,
  sequence_length: Mapping[str, int] | None = None,
  data_dir: str | None = None,
  vocabulary: str | None = None,
) -> list[TokenizedExample]:
  """Reads examples in the order of the files, from disk only.

  An example's id is its field `id`, if the task has one, and else the task,
  the split and the example's number: a restart gives the same ones.

  Args:
    name: of a task or mixture that `tasks.get` knows. The tasks of a mixture
      come one after another, whatever its rates.
    split: of the task.
    num_examples: how many of each task, from the start; None for all.
    sequence_length: longest 'inputs' and 'targets' in tokens, EOS included;
      the ids of longer ones are cut, their texts are not. None cuts nothing.
    data_dir: of TFDS, from now on; None for that of the task, or TFDS's own.
    vocabulary: path of a SentencePiece model to use instead of the task's,
      such as a local copy of T5's.

  Raises:
    ValueError: no such task or split, or it has no examples.
    FileNotFoundError: the data or the vocabulary is not on disk.
  """
  _hide_accelerators()
  examples = []
  for task in seqio.get_subtasks(tasks.get(name)):
    _require_data(task, data_dir)
    if split not in task.splits:
      raise ValueError(
        f'Expected a split of task {task.name!r}, got {split!r}. It has'
        f' {", ".join(sorted(task.splits))}.'
      )
    task = _with_vocabulary(task, vocabulary)
    dataset = task.get_dataset(sequence_length, split, shuffle=False)
    rows = itertools.islice(dataset.as_numpy_iterator(), num_examples)
    for number, row in enumerate(rows):
      examples.append(_example(task, row, f'{task.name}:{split}:{number}'))
  if not examples:
    raise ValueError(
      f'Expected examples in split {split!r} of {name!r}, got none.'
    )
  return examples


def _hide_accelerators() -> None:
  """Keeps TensorFlow from taking the memory that JAX needs."""
  try:
    for kind in ('GPU', 'TPU'):
      tf.config.set_visible_devices([], kind)
  except RuntimeError as error:
    raise RuntimeError(
      'TensorFlow has already taken the accelerators. Call'
      ' `prompts.from_task` before anything else uses TensorFlow.'
    ) from error


def _example(
  task: seqio.Task, row: Mapping[str, Any], default_id: str
) -> TokenizedExample:
  ids, texts = {}, {}
  for field in ('inputs', 'targets'):
    ids[field] = np.asarray(row.get(field, ()), np.int32)
    original = row.get(f'{field}_pretokenized')
    if original is not None:
      texts[field] = original.decode()
    elif field in task.output_features:
      vocabulary = task.output_features[field].vocabulary
      texts[field] = vocabulary.decode(ids[field].tolist())
    else:
      texts[field] = ''
  example_id = row.get('id')
  if isinstance(example_id, bytes):
    example_id = example_id.decode()
  return TokenizedExample(
    id=default_id if example_id is None else str(example_id),
    inputs=texts['inputs'],
    targets=texts['targets'],
    input_ids=ids['inputs'],
    target_ids=ids['targets'],
  )


def _require_data(task: seqio.Task, data_dir: str | None) -> None:
  """Raises unless a TFDS task's data lies ready.

  SeqIO would download it, or without a network try for minutes.
  """
  if not isinstance(task.source, seqio.TfdsDataSource):
    return
  dataset = task.source.tfds_dataset
  if data_dir is not None:
    dataset.override_data_dir(os.path.expanduser(data_dir))
  if dataset.name is None:  # every split is a data set of its own
    return
  root = dataset.data_dir or tfds.core.constants.DATA_DIR
  base, _, version = dataset.name.partition(':')
  pattern = f'{root}/{base}/{version or "*"}/dataset_info.json'
  if not tf.io.gfile.glob(pattern):
    raise FileNotFoundError(
      f'Task {task.name!r} reads the TFDS data set {dataset.name!r}, which is'
      f' not in {root}. Run `tfds build {dataset.name} --data_dir={root}` where'
      ' there is a network, or pass the data_dir of a copy. Examples in a JSONL'
      ' file need neither: `data.text.read`.'
    )


def _with_vocabulary(task: seqio.Task, path: str | None) -> seqio.Task:
  """The task with its vocabulary, or one read from `path`, made sure of."""
  features = {}
  for key, feature in task.output_features.items():
    vocabulary = feature.vocabulary
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
      theirs = vocabulary.sentencepiece_model_file
      _require_vocabulary(task.name, theirs, path)
      if path is not None:
        vocabulary = seqio.SentencePieceVocabulary(
          str(path), vocabulary.extra_ids
        )
    features[key] = dataclasses.replace(feature, vocabulary=vocabulary)
  if path is None:
    return task
  return seqio.Task(
    task.name,
    source=task.source,
    preprocessors=task.preprocessors,
    output_features=features,
  )


def _require_vocabulary(name: str, theirs: str, ours: str | None) -> None:
  # A path that was passed may be remote: then that is what is wanted.
  remote = ours is None and '://' in theirs
  if remote or not tf.io.gfile.exists(str(ours or theirs)):
    raise FileNotFoundError(
      f'Task {name!r} needs the SentencePiece model {theirs}, and'
      f' {"it is not on disk" if ours is None else f"{ours} is no file"}. Pass'
      ' the path of a local copy as `vocabulary`.'
    )
