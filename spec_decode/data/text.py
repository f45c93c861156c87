# SPDX-License-Identifier: Apache-2.0
"""Text in JSONL or TSV files -> NumPy batches, without TensorFlow.

A JSONL line is an object with "inputs", "targets" and, if there is one, "id".
A TSV line is inputs, tab, targets. `prompts.py` gives the same from SeqIO.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import json
import pathlib

import numpy as np
import sentencepiece

ASSETS = pathlib.Path(__file__).parent.parent / 'assets'


@dataclasses.dataclass(frozen=True)
class Example:
  """One pair of texts. `id` names it in every output and seeds its row."""

  id: str
  inputs: str
  targets: str = ''


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
    self.path = str(path or ASSETS / 'debian' / 'vocab.model')
    if not pathlib.Path(self.path).is_file():
      raise FileNotFoundError(
        f'Expected a SentencePiece model at {self.path!r}, found none. Give'
        ' the path of a local copy.'
      )
    content = pathlib.Path(self.path).read_bytes()
    self.fingerprint = hashlib.sha256(
      content + str(extra_ids).encode()
    ).hexdigest()
    self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
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


def read(path: str) -> list[Example]:
  """Examples of a .jsonl or .tsv file, in order.

  Raises:
    FileNotFoundError: no such file.
    ValueError: a line is not of the format, or there is no line at all.
  """
  path = pathlib.Path(path).expanduser()
  if not path.is_file():
    shipped = ASSETS / 'debian' / path.name
    hint = f' Did you mean {shipped}?' if shipped.is_file() else ''
    raise FileNotFoundError(
      f'Expected examples at {path}, found no file.{hint}'
    )
  examples = []
  with path.open(encoding='utf-8') as lines:
    for number, line in enumerate(lines):
      if line.strip():
        examples.append(_parse(line, path, number))
  if not examples:
    raise ValueError(f'Expected at least one example in {path}, got none.')
  return examples


def _parse(line: str, path: pathlib.Path, number: int) -> Example:
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
      fields.get('targets', ''),
    )
  except (ValueError, KeyError, AttributeError) as error:
    raise ValueError(
      f'Expected a JSON object with "inputs" (and "targets"), got'
      f' {line.strip()[:60]!r}: {where}.'
    ) from error


def pad(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Rows of ids -> int32 [len(rows), length], cut and zero-padded."""
  out = np.zeros((len(rows), length), np.int32)
  for i, row in enumerate(rows):
    row = row[:length]
    out[i, : len(row)] = row
  return out


@dataclasses.dataclass(frozen=True)
class BucketedBatches:
  """Endless, seeded training batches of few shapes; a step has one batch.

  Every example goes to the first bucket that holds it; longer ones are left
  out and counted in `left_out`. Iterating from a step gives what an
  uninterrupted run would have seen.

  Attributes:
    sources: path of a JSONL or TSV file -> how often an epoch contains it.
    vocabulary: the tokenizer.
    buckets: (inputs, targets) lengths in tokens, EOS included, cheapest first.
    tokens_per_batch: decoder positions of a batch, padding included; see
      `batch_size`.
    seed: of the order.
  """

  sources: Mapping[str, float]
  vocabulary: Vocabulary
  buckets: Sequence[tuple[int, int]]
  tokens_per_batch: int
  seed: int = 0

  @functools.cached_property
  def _tokens(self):
    eos = [self.vocabulary.eos_id]
    parts = []
    for path, weight in self.sources.items():
      examples = read(path)
      inputs = self.vocabulary.encode([e.inputs for e in examples])
      targets = self.vocabulary.encode([e.targets for e in examples])
      pairs = [(x + eos, y + eos) for x, y in zip(inputs, targets)]
      parts.append((weight, pairs))
    return parts

  @property
  def left_out(self) -> int:
    """Number of examples that no bucket holds."""
    return sum(
      self._bucket(pair) is None for _, pairs in self._tokens for pair in pairs
    )

  def _bucket(self, pair) -> int | None:
    for i, (inputs, targets) in enumerate(self.buckets):
      if len(pair[0]) <= inputs and len(pair[1]) <= targets:
        return i
    return None

  def _epoch(self, epoch: int) -> list[tuple[int, list]]:
    rng = np.random.default_rng([self.seed, epoch])
    waiting = [[] for _ in self.buckets]
    batches = []
    pool = []
    for weight, pairs in self._tokens:
      count = int(weight * len(pairs))
      order = np.concatenate(
        [rng.permutation(len(pairs)) for _ in range(-(-count // len(pairs)))]
      )[:count]
      pool.extend(pairs[i] for i in order)
    for i in rng.permutation(len(pool)):
      bucket = self._bucket(pool[i])
      if bucket is None:
        continue
      waiting[bucket].append(pool[i])
      if len(waiting[bucket]) == self.batch_size(bucket):
        batches.append((bucket, waiting[bucket]))
        waiting[bucket] = []
    # What does not fill a batch waits for another epoch's order.
    return [batches[i] for i in rng.permutation(len(batches))]

  def batch_size(self, bucket: int) -> int:
    """Examples per batch; a long input counts a quarter of a target."""
    inputs, targets = self.buckets[bucket]
    return max(1, self.tokens_per_batch // max(targets, inputs // 4))

  def from_step(self, step: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields {'inputs' [B, I], 'targets' [B, W]} from a step on."""
    epoch = 0
    while True:
      batches = self._epoch(epoch)
      if not batches:
        raise ValueError(
          'Expected enough examples for one batch, got none that fits a'
          f' bucket of {list(self.buckets)}. Add longer buckets or shrink'
          ' tokens_per_batch.'
        )
      for bucket, pairs in batches[step:]:
        inputs, targets = self.buckets[bucket]
        yield {
          'inputs': pad([x for x, _ in pairs], inputs),
          'targets': pad([y for _, y in pairs], targets),
        }
      step = max(0, step - len(batches))
      epoch += 1
