# SPDX-License-Identifier: Apache-2.0
"""Drafts that are no networks, as a `Workload` takes them (section 3.6)."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

from spec_decode import checks
from spec_decode import drafts
from spec_decode.data import text
from spec_decode.language_model import Draft
from spec_decode.models import ngram
from spec_decode.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class NGrams:
  """Tables that `count` wrote.

  Attributes:
    name: for tables.
    checkpoint: path of the tables; see `text.resolve`.
    vocab_size: number of real ids.
    order: 1 for unigrams, 2 for bigrams, ...; longer contexts are not used.
  """

  name: str
  checkpoint: str
  vocab_size: int
  order: int = 2

  @property
  def path(self) -> str:
    return text.resolve(self.checkpoint)

  def load(self) -> ngram.Tables:
    tables = ngram.load(self.path)
    used = {'unigram', *(f'order_{n}' for n in range(2, self.order + 1))}
    return {name: table for name, table in tables.items() if name in used}

  def as_draft(self, gamma: int, sampling: Sampling) -> drafts.NGramDraft:
    return drafts.NGramDraft(self.vocab_size, sampling, gamma)

  def problems(self, vocabulary: text.Vocabulary) -> list[str]:
    """What keeps these tables from being used with a vocabulary."""
    found = checks.mistyped(NGrams, vars(self))
    if found:
      return found
    try:
      counted = ngram.counted_with(self.path)
      tables = ngram.load(self.path)
    except (FileNotFoundError, ValueError) as error:
      return [str(error)]
    longest = ngram.context_length(tables) + 1
    if not 1 <= self.order <= longest:
      found.append(
        f'Expected order in 1..{longest}, the orders of {self.path}, got'
        f' {self.order}. Choose one of these.'
      )
    try:
      self.as_draft(1, Sampling()).prepare(tables)
    except ValueError as error:
      found.append(str(error))
    return found + text.vocabulary_problems(
      self.path, 'counted', counted, vocabulary.path, vocabulary.fingerprint
    )


@dataclasses.dataclass(frozen=True)
class Rule:
  """A draft that follows a rule and has no parameters.

  Attributes:
    name: for tables.
    rule: such as `CopyDraft` or `UniformDraft`.
    vocab_size: number of real ids.
  """

  name: str
  rule: Callable[[int, int], Draft]
  vocab_size: int
  path = None

  def load(self) -> None:
    return None

  def as_draft(self, gamma: int, sampling: Sampling) -> Draft:
    del sampling
    return self.rule(self.vocab_size, gamma)

  def problems(self, vocabulary: text.Vocabulary) -> list[str]:
    del vocabulary
    return checks.mistyped(Rule, vars(self))


def count(
  output_dir: str,
  source: str | Callable[[], Sequence[text.Example]],
  order: int = 2,
  successors: int = 32,
  max_contexts: int | None = None,
  vocabulary: str | None = None,
  extra_ids: int = 0,
  targets: str = 'targets',
) -> dict[str, Any]:
  """Counts the targets of a file into ngrams.safetensors.

  Args:
    output_dir: gets the file.
    source: see `text.load`.
    order, successors, max_contexts: see `ngram.count`.
    vocabulary: path of the SentencePiece model; None for the shipped one.
    extra_ids: sentinel ids that it has beyond its pieces, as in `text.Prompts`.
    targets: as in `text.read`; "tokens" counts what a model wrote.

  Returns:
    For a record: texts, tokens and contexts.
  """
  tokenizer = text.Vocabulary(vocabulary, extra_ids)
  rows = [example.targets for example in text.load(source, targets)]
  if isinstance(rows[0], str):
    rows = [[*row, tokenizer.eos_id] for row in tokenizer.encode(rows)]
  tables = ngram.count(
    rows, tokenizer.size, order, successors, max_contexts=max_contexts
  )
  summary = {'texts': len(rows), 'tokens': sum(map(len, rows))}
  ngram.save(
    pathlib.Path(output_dir) / 'ngrams.safetensors',
    tables,
    summary | {'vocabulary': tokenizer.fingerprint},
  )
  return summary
