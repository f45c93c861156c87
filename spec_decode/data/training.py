# SPDX-License-Identifier: Apache-2.0
"""Training batches of few shapes from the texts of `text.py`."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from spec_decode.data import text


@dataclasses.dataclass(frozen=True)
class Source:
  """Training pairs of one file.

  Attributes:
    path: .jsonl or .tsv; or a function that gives examples, such as
      `text.plain` bound to a path.
    weight: how often an epoch contains the file; 0.5 for half of it.
    targets: as in `text.read`.
  """

  path: str | Callable[[], Sequence[text.Example]]
  weight: float = 1.0
  targets: str = 'targets'


@dataclasses.dataclass(frozen=True)
class BucketedBatches:
  """Endless, seeded training batches of few shapes; a step has one batch.

  Every example goes to the first bucket that holds it; longer ones are left
  out and counted in `left_out`. Iterating from a step gives what an
  uninterrupted run would have seen.

  Attributes:
    sources: the files.
    vocabulary: the tokenizer.
    buckets: (inputs, targets) lengths in tokens, EOS included, cheapest first.
    tokens_per_batch: decoder positions of a batch, padding included; see
      `batch_size`.
    seed: of the order.
  """

  sources: Sequence[Source]
  vocabulary: text.Vocabulary
  buckets: Sequence[tuple[int, int]]
  tokens_per_batch: int
  seed: int = 0

  @functools.cached_property
  def _tokens(self):
    eos = [self.vocabulary.eos_id]
    parts = []
    for source in self.sources:
      examples = text.load(source.path, source.targets)
      inputs = self.vocabulary.encode([e.inputs for e in examples])
      targets = [e.targets for e in examples]
      empty = [e.id for e in examples if not e.targets]
      if empty:
        raise ValueError(
          f'Expected targets to train on in all {len(examples)} examples, got'
          f' {len(empty)} without (the first is {empty[0]!r}). Name the field'
          ' that holds them, or remove these.'
        )
      if isinstance(targets[0], str):
        targets = [y + eos for y in self.vocabulary.encode(targets)]
      pairs = [(x + eos, y) for x, y in zip(inputs, targets)]
      parts.append((source.weight, pairs))
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
      while count > 0:
        order = rng.permutation(len(pairs))[:count]
        pool.extend(pairs[i] for i in order)
        count -= len(pairs)
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
          'inputs': text.pad([x for x, _ in pairs], inputs),
          'targets': text.pad([y for _, y in pairs], targets),
        }
      step = max(0, step - len(batches))
      epoch += 1
