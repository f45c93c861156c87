# SPDX-License-Identifier: Apache-2.0
"""Decodes a file: predictions as JSONL, counts, quality, and sample outputs."""

from collections.abc import Iterator
import itertools
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text
import tqdm

from spec_decode import checks
from spec_decode import speculative
from spec_decode.autoregressive import STOPPED_BY_EOS
from spec_decode.data import text
from spec_decode.measure import acceptance_rate
from spec_decode.measure import quality
from spec_decode.measure.acceptance_rate import COUNTED
from spec_decode.report import marks
from spec_decode.workload import Workload


def problems(workload: Workload, **arguments) -> list[str]:
  """What `generate` cannot work on."""
  found = checks.below(0, arguments, 'num_samples')
  metric = workload.prompts.metric
  if metric not in (None, *quality.METRICS):
    found.append(
      f'Expected a metric of {sorted(quality.METRICS)}, got {metric!r}. Choose'
      ' one of these, or None.'
    )
  return found


def generate(
  workload: Workload,
  output_dir: str,
  earlier: dict[str, Any] | None = None,
  num_samples: int = 5,
  compare: bool = True,
) -> dict[str, Any]:
  """Decodes all prompts speculatively.

  Args:
    workload: what to decode.
    output_dir: gets predictions.jsonl and samples.txt.
    earlier: unused.
    num_samples: outputs to show block by block.
    compare: at temperature 0, decode without speculation too and count the
      examples that differ.

  Returns:
    For a record: counts over all examples, quality, differing examples.
  """
  del earlier
  directory = pathlib.Path(output_dir)
  directory.mkdir(parents=True, exist_ok=True)
  lines, differing = [], None
  exact = workload.temperature == 0 and workload.replay is None
  compare = compare and exact
  began, first, total = None, 0, len(workload.prompts.examples)
  with (
    (directory / 'predictions.jsonl').open('w', encoding='utf-8') as out,
    tqdm.tqdm(total=total, desc='generate', unit='example') as bar,
  ):
    for batch in workload.batches():
      result = workload.decode(batch)
      if compare:
        plain = workload.decode_plain(batch)
        unequal = np.any(np.asarray(plain.tokens != result.tokens), axis=1)
        differing = (differing or 0) + int(np.sum(unequal[: batch.count]))
      for line in _lines(workload, batch, result, len(lines)):
        out.write(json.dumps(line, ensure_ascii=False) + '\n')
        lines.append(line)
      if began is None:  # what came before was compilation
        began, first = time.perf_counter(), len(lines)
      seconds = time.perf_counter() - began
      tokens = sum(line['num_tokens'] for line in lines[first:])
      tested = max(1, sum(line['tested'] for line in lines))
      accepted = sum(line['accepted'] for line in lines)
      bar.update(batch.count)
      bar.set_postfix_str(
        f'{tokens / max(seconds, 1e-9):.0f} tokens/s, accepted/tested'
        f' {accepted / tested:.2f}'
      )
  summary = _summary(lines)
  metric = workload.prompts.metric
  if metric is not None:
    references = [e.targets for e in workload.prompts.examples]
    predictions = [line['prediction'] for line in lines]
    summary |= quality.measure(metric, predictions, references)
  if differing is not None:
    summary['differing_outputs'] = differing
  _write_samples(workload, directory / 'samples.txt', num_samples)
  return summary


def _lines(workload: Workload, batch, result, first: int) -> Iterator[dict]:
  """One JSON object per real row of a batch."""
  result = speculative.Result(
    **{k: np.asarray(v) for k, v in vars(result).items()}
  )
  for i in range(batch.count):
    example = workload.prompts.examples[first + i]
    length = int(result.length[i])
    ids = result.tokens[i, :length].tolist()
    yield {
      'id': example.id,
      'inputs': workload.prompts.shown(first + i),
      'prediction': workload.prompts.tokenizer.decode(ids),
      'targets': example.targets,
      'tokens': ids,
      'num_tokens': length,
      'stop': 'eos' if result.stop[i] == STOPPED_BY_EOS else 'length',
      'log_prob': float(result.log_probs[i].sum()),
      'target_calls': int(result.target_calls[i]),
      'drawn': int(result.drawn[i]),
      'tested': int(result.tested[i]),
      'accepted': int(result.accepted[i]),
      'histogram': result.histogram[i].tolist(),
      'simulated': workload.replay is not None,
    }


def _summary(lines: list[dict]) -> dict[str, Any]:
  """Totals, with the three measures of acceptance named apart."""
  column = lambda name: [line[name] for line in lines]
  return {
    'examples': len(lines),
    'tokens': sum(column('num_tokens')),
    'target_calls': sum(column('target_calls')),
    'histogram': np.sum(column('histogram'), axis=0).tolist(),
    **acceptance_rate.counts(**{name: column(name) for name in COUNTED}),
  }


def blocks(
  workload: Workload, batch: text.Batch, row: int
) -> Iterator[list[tuple[str, int]]]:
  """For one row, per block a list of (what happened, token id)."""
  for block, _ in speculative.stream(
    workload.speculation(),
    *workload.params,
    batch.inputs,
    workload.keys(batch),
    batch.prompt,
  ):
    block = jax.tree.map(lambda x: np.asarray(x)[row], block)
    if not block.count:
      return
    yield [(what, token) for what, token, _ in marks.judged(block)]


def _write_samples(workload: Workload, path: pathlib.Path, number: int) -> None:
  """Shows outputs block by block: coloured on screen, marked in a file."""
  console, lines = Console(), [marks.LEGEND, '']
  if workload.replay is not None:
    lines.insert(0, f'Simulated: guesses accepted at {workload.replay:g}.')
  show = lambda *parts: _shown(console.color_system is not None, *parts)
  if number:
    console.print(Text('\nSamples, a line per target call:'))
    console.print(show(*((what, row[3]) for what, row in marks.MARKS.items())))
  shown = 0
  for batch in workload.batches():
    for row in range(batch.count):
      if shown == number:
        path.write_text('\n'.join(lines) + '\n', encoding='utf-8')
        return
      example = workload.prompts.examples[shown]
      title = f'{example.id}: {workload.prompts.shown(shown)}'
      console.print(Text(f'\n{title}', style='dim'))
      lines += [title]
      piece = workload.prompts.tokenizer.piece
      for block in blocks(workload, batch, row):
        parts = [(what, piece(token)) for what, token in block]
        console.print(show(*parts))
        lines.append('  ' + ''.join(itertools.starmap(marks.marked, parts)))
      lines.append('')
      shown += 1
  path.write_text('\n'.join(lines) + '\n', encoding='utf-8')


def _shown(colour: bool, *parts: tuple[str, str]) -> Text:
  """Pieces of text coloured by what happened to them, else marked."""
  line = Text('  ')
  for what, piece in parts:
    line.append(
      piece if colour else marks.marked(what, piece), marks.MARKS[what][2]
    )
  return line
