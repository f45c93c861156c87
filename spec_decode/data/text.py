# SPDX-License-Identifier: Apache-2.0
"""Text in JSONL or TSV files -> NumPy batches, without TensorFlow.

A JSONL line is an object with "inputs", "targets" and, if there is one, "id".
A TSV line is inputs, tab, targets. `prompts.py` gives the same from SeqIO.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import json
import os
import pathlib

import numpy as np
import sentencepiece

from spec_decode import checks

ASSETS = pathlib.Path(__file__).parent.parent / 'assets'


def resolve(path: str) -> str:
  """A path; one that starts with "assets/" is of this package, "~" is home."""
  if path.startswith('assets/'):
    return os.fspath(ASSETS / path.removeprefix('assets/'))
  return os.path.expanduser(path)


@dataclasses.dataclass(frozen=True)
class Example:
  """One pair of texts. `id` names it in every output and seeds its row.

  Targets that a model wrote may be its token ids, EOS included: encoding their
  text again would give other ids, and an EOS where the model wrote none.
  """

  id: str
  inputs: str
  targets: str | Sequence[int] = ''


class Vocabulary:
  """A SentencePiece model with T5's conventions: 0 is padding, 1 is EOS.

  Attributes:
    path: where the model came from.
    size: number of real ids; T5 checkpoints pad their tables beyond it.
    fingerprint: hash of the content, to compare two vocabularies by.
  """

  pad_id = 0
  eos_id = 1

  def __init__(self, path: str | None = None, extra_ids: int = 0):
    self.path = resolve(path or 'assets/debian/vocab.model')
    if not pathlib.Path(self.path).is_file():
      raise FileNotFoundError(
        f'Expected a SentencePiece model at {self.path!r}, found none. Give'
        ' the path of a local copy.'
      )
    content = pathlib.Path(self.path).read_bytes()
    self.fingerprint = fingerprint(content, extra_ids)
    try:
      self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
      raise ValueError(
        f'Expected a SentencePiece model in {self.path!r}, got another file.'
        ' Give the path of one.'
      ) from error
    self.size = self._model.vocab_size() + extra_ids

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    return self._model.encode(list(texts))

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids up to EOS; padding and extra ids leave no trace."""
    ids = [int(i) for i in ids]
    if self.eos_id in ids:
      ids = ids[: ids.index(self.eos_id)]
    known = self._model.vocab_size()
    return self._model.decode([i for i in ids if self.pad_id < i < known])

  def piece(self, token: int) -> str:
    """One token as it looks in running text."""
    if token >= self._model.vocab_size():
      return f'<extra {token}>'
    return self._model.id_to_piece(int(token)).replace('\u2581', ' ')


def fingerprint(model: bytes, extra_ids: int) -> str:
  """What tells the content of two vocabularies apart, wherever they lie."""
  return hashlib.sha256(model + str(extra_ids).encode()).hexdigest()


def vocabulary_problems(
  path: str, made: str, recorded: str | None, used: str, fingerprint: str
) -> list[str]:
  """Whether a file was made with the vocabulary that it is used with.

  Args:
    path: of weights or tables.
    made: how these came about, such as 'trained'.
    recorded: the fingerprint that the file names; None for none.
    used: the name of the vocabulary in use.
    fingerprint: its fingerprint.
  """
  if recorded in (None, fingerprint):
    return []
  return [
    f'Expected the vocabulary that {path} was {made} with (sha256'
    f' {recorded[:12]}...), got {used} ({fingerprint[:12]}...).'
  ]


def read(path: str, targets: str = 'targets') -> list[Example]:
  """Examples of a .jsonl or .tsv file, in order.

  Args:
    path: of the file; see `resolve`.
    targets: the JSON field that holds the targets, such as "tokens" for what
      a model wrote.

  Raises:
    FileNotFoundError: no such file.
    ValueError: a line is not of the format, or there is no line at all.
  """
  path = pathlib.Path(resolve(os.fspath(path)))
  if not path.is_file():
    shipped = ASSETS / 'debian' / path.name
    hint = ''
    if shipped.is_file():
      hint = f' Did you mean "assets/debian/{path.name}"?'
    raise FileNotFoundError(
      f'Expected examples at {path}, found no file.{hint}'
    )
  examples = []
  with path.open(encoding='utf-8') as lines:
    for number, line in enumerate(lines):
      if line.strip():
        examples.append(_parse(line, path, number, targets))
  if not examples:
    raise ValueError(f'Expected at least one example in {path}, got none.')
  return examples


def load(
  source: str | Callable[[], Sequence[Example]], targets: str = 'targets'
) -> Sequence[Example]:
  """Examples of a file, see `read`, or of a function such as `plain`, bound."""
  return source() if callable(source) else read(source, targets)


def plain(path: str, field: str = 'inputs', prefix: str = '') -> list[Example]:
  """Texts for networks without inputs: a field as the targets of examples.

  Args:
    path: as `read`.
    field: the JSON field that holds the text.
    prefix: what is removed from the start of each, such as the task's name.
  """
  cut = (lambda text: text.removeprefix(prefix)) if prefix else lambda x: x
  return [Example(e.id, '', cut(e.targets)) for e in read(path, field)]


def _parse(line: str, path: pathlib.Path, number: int, targets: str) -> Example:
  where = f'{path}, line {number + 1}'
  if path.suffix == '.tsv':
    fields = line.rstrip('\n').split('\t')
    if len(fields) > 2:
      raise ValueError(
        f'Expected "inputs<tab>targets", got {len(fields)} fields: {where}.'
      )
    return Example(f'{path.stem}:{number}', *fields)
  try:
    fields = json.loads(line)
    return Example(
      str(fields.get('id', f'{path.stem}:{number}')),
      fields['inputs'],
      fields.get(targets, ''),
    )
  except (ValueError, KeyError, AttributeError) as error:
    raise ValueError(
      f'Expected a JSON object with "inputs" (and "targets"), got'
      f' {line.strip()[:60]!r}: {where}.'
    ) from error


def rounded(length: int, step: int = 16) -> int:
  """Up to a multiple of `step`: near lengths share a compiled program."""
  return -(-length // step) * step


def pad(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Rows of ids -> int32 [len(rows), length], cut and zero-padded."""
  out = np.zeros((len(rows), length), np.int32)
  for i, row in enumerate(rows):
    row = row[:length]
    out[i, : len(row)] = row
  return out


@dataclasses.dataclass(frozen=True)
class Batch:
  """A batch of prompts; rows from `count` on only fill it up."""

  inputs: np.ndarray  # int32 [B, I], EOS included, zeros after
  ids: np.ndarray  # uint32 [B], of the examples, for `randomness.row_keys`
  count: int
  # (tokens [B, P], lengths [B]) that the decoder goes on from; None: one id 0
  prompt: tuple[np.ndarray, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Prompts:
  """Examples of a task, as the jobs take them. Reads nothing before it must.

  Attributes:
    task: name for tables.
    source: path of a .jsonl or .tsv file, or a function that gives examples,
      such as `prompts.from_task` bound to a task.
    vocabulary: path of the SentencePiece model; None for the shipped one.
    input_length: tokens per input at most, EOS included. Batches are as wide as
      the longest of all inputs, rounded up, so that they have one shape.
    num_examples: how many, from the start; None for all.
    truncate: cut longer inputs instead of refusing them.
    extra_ids: sentinel ids that the vocabulary has beyond its pieces.
    continued: for networks without an encoder the field of an example,
      'inputs' or 'targets', whose tokens the decoder goes on from: its first
      `input_length`, without an EOS; with 0 and `truncate` the generation is
      unconditional. None where an encoder reads the inputs.
    metric: what the task is scored by, of `quality.METRICS`; None for nothing.
  """

  task: str
  source: str | Callable[[], Sequence[Example]]
  vocabulary: str | None = None
  input_length: int = 128
  num_examples: int | None = None
  truncate: bool = False
  extra_ids: int = 0
  continued: str | None = None
  metric: str | None = None

  @functools.cached_property
  def tokenizer(self) -> Vocabulary:
    return Vocabulary(self.vocabulary, self.extra_ids)

  @functools.cached_property
  def examples(self) -> Sequence[Example]:
    return load(self.source)[: self.num_examples]

  @functools.cached_property
  def _rows(self) -> list[list[int]]:
    field = self.continued or 'inputs'
    texts = [getattr(example, field) for example in self.examples]
    end = [] if self.continued else [Vocabulary.eos_id]
    return [row + end for row in self.tokenizer.encode(texts)]

  def shown(self, index: int) -> str:
    """What an output of example `index` follows, for people."""
    if self.continued:
      return self.tokenizer.decode(self._rows[index][: self.input_length])
    return self.examples[index].inputs

  def problems(self) -> list[str]:
    """What keeps these prompts from being used, each with its remedy."""
    found = checks.mistyped(Prompts, vars(self))
    if found:
      return found
    if self.continued not in (None, 'inputs', 'targets'):
      return [
        "Expected continued to be 'inputs', 'targets' or None, got"
        f' {self.continued!r}.'
      ]
    if self.num_examples is not None and self.num_examples < 1:
      found.append(
        f'Expected num_examples >= 1, or None for all, got {self.num_examples}.'
      )
    # Nothing at all to read is unconditional generation.
    least = 0 if self.continued and self.truncate else 1
    found += checks.below(least, vars(self), 'input_length')
    if found:
      return found
    try:
      rows = self._rows
    except (FileNotFoundError, ValueError) as error:
      return [str(error)]
    long = [i for i, row in enumerate(rows) if len(row) > self.input_length]
    if long and not self.truncate:
      worst = max(len(rows[i]) for i in long)
      found.append(
        f'Expected inputs of at most {self.input_length} tokens, got'
        f' {len(long)} longer ones (the first is {self.examples[long[0]].id!r},'
        f' the longest has {worst}). Raise input_length or set truncate=True.'
      )
    empty = [e.id for e in self.examples if not e.inputs.strip()]
    if empty and not self.continued:
      found.append(
        f'Expected every input to have text, got {len(empty)} without (the'
        f' first is {empty[0]!r}). Remove them from the source.'
      )
    return found

  @functools.cached_property
  def width(self) -> int:
    """Of the inputs in every batch."""
    longest = max(len(row) for row in self._rows)
    return min(self.input_length, rounded(longest))

  def batches(self, size: int) -> Iterator[Batch]:
    """All prompts in order, in batches of `size` rows."""
    inputs, prompt = pad(self._rows, self.width), None
    if self.continued:
      lengths = [1 + min(len(row), self.width) for row in self._rows]
      prompt = np.pad(inputs, ((0, 0), (1, 0))), np.array(lengths, np.int32)
      inputs = np.zeros((len(lengths), 1), np.int32)  # nothing to encode
    else:
      # A cut input still ends as the model expects inputs to end.
      full = inputs[:, -1] != 0
      inputs[full, -1] = Vocabulary.eos_id
    ids = np.array([example_key(e.id) for e in self.examples], np.uint32)
    for start in range(0, len(ids), size):
      rows = np.arange(start, start + size)
      count = int(np.sum(rows < len(ids)))
      rows = np.minimum(rows, len(ids) - 1)
      taken = prompt and tuple(x[rows] for x in prompt)
      yield Batch(inputs[rows], ids[rows], count, taken)


def example_key(example_id: str) -> int:
  """A stable uint32 of an example's id."""
  digest = hashlib.sha256(example_id.encode()).digest()
  return int.from_bytes(digest[:4], 'big')
