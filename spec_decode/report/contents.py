# SPDX-License-Identifier: Apache-2.0
"""What the page of each table and figure says, from its records."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

from spec_decode.report import figures
from spec_decode.report import marks
from spec_decode.report import tables

Cell = Callable[[tables.Row], str]


@dataclasses.dataclass(frozen=True)
class Page:
  """What one folder of `experiments` shows.

  Attributes:
    title: of the paper's table or figure.
    about: what it is, and how ours differs.
    body: root -> Markdown.
    picture: root -> Matplotlib figure.
  """

  title: str
  about: str
  body: Callable[[str], str]
  picture: Callable[[str], Any]


def markdown(rows: Sequence[dict[str, str]]) -> str:
  """Rows of equal keys as a table."""
  titles = list(rows[0])
  lines = [titles, ['---'] * len(titles), *(row.values() for row in rows)]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def number(name: str, digits: int = 2, error: str | None = None) -> Cell:
  """A column's cell: the value, with its standard error if it has one."""

  def cell(row: tables.Row) -> str:
    value = row.get(name)
    if value is None:
      return ''
    if isinstance(value, str):
      return value
    text = f'{value:.{digits}f}' if digits else f'{value:g}'
    return text + tables.plus_minus(error and row.get(error), digits)

  return cell


def _settings(name: str) -> Cell:
  """The published gamma, and what was published beside it under `name`."""
  published = f'published_{name}'
  return lambda row: (
    f'{row["published_gamma"]:g}, {row[published]:g}'
    if 'published_gamma' in row
    else ''
  )


def _off(prediction: str) -> Cell:
  """How far a prediction is from the measured speed-up, in per cent."""

  def cell(row: tables.Row) -> str:
    if row.get(prediction) is None:
      return ''
    return f'{100 * (row[prediction] / row["speedup"] - 1):+.0f} %'

  return cell


_COMMON = {
  'task': number('task'),
  'draft': number('draft'),
  'T': number('temperature', 0),
}
_ALPHA = {
  'published α': number('published_alpha'),
  'our α': number('alpha', 3, 'alpha_error'),
  'tokens': number('tokens', 0),
  'examples': number('examples', 0),
}
_DECODED = {
  'γ': number('gamma', 0),
  'accepted / tested': number(
    'accepted_per_tested', 2, 'accepted_per_tested_error'
  ),
  'accepted / drawn': number(
    'accepted_per_drawn', 2, 'accepted_per_drawn_error'
  ),
  'tokens per call': number('tokens_per_call', 2, 'tokens_per_call_error'),
  'decoded': number('decoded', 0),
}
_END = {
  'our pair': number('pair'),
  'hardware': number('hardware'),
  'status': number('status'),
}


def _table(rows: Callable[[str], list[tables.Row]], columns: dict[str, Cell]):
  """Body of a page: those rows in those columns."""

  def body(root: str) -> str:
    return markdown(
      [
        {name: cell(row) for name, cell in columns.items()}
        for row in rows(root)
      ]
    )

  return body


_BY_STRENGTH = (
  'Unigram', 'Bigram', 'Trigram', 'GPT-like (6M)', 'T5-small', 'T5-base',
  'T5-large',
)  # fmt: skip


def _table3(root: str) -> str:
  """The rows, and whether stronger drafts have larger alpha."""
  body = _table(
    tables.table3,
    {'target': number('target')} | _COMMON | _ALPHA | _DECODED | _END,
  )(root)
  groups: dict[tuple, dict[str, float]] = {}
  for row in tables.table3(root):
    if 'alpha' in row and row['draft'] in _BY_STRENGTH:
      key = row['target'], row['task'], row['temperature']
      groups.setdefault(key, {})[row['draft']] = row['alpha']
  lines = []
  for (_, task, temperature), alphas in groups.items():
    drafts = sorted(alphas, key=_BY_STRENGTH.index)
    if len(drafts) == 1:
      continue
    values = [alphas[draft] for draft in drafts]
    grows = 'grows' if values == sorted(values) else 'does not always grow'
    lines.append(
      f'- {task}, temperature {temperature:g}: our α {grows} along'
      f' {", ".join(drafts)}'
    )
  return f'{body}\n\n' + '\n'.join(lines)


def _table4(root: str) -> str:
  body = _table(
    tables.table4,
    _COMMON
    | {
      'published γ, c': _settings('c'),
      'expected': number('published_expected', 1),
      'measured': number('published_measured', 1),
      'our γ': number('gamma', 0),
      'c': number('c', 3, 'c_error'),
      'c alone': number('c_alone', 3),
      'T(γ+1)/T(1)': number('wide_ratio'),
      'α': number('alpha', 3, 'alpha_error'),
      'tokens per call': number('tokens_per_call', 2, 'tokens_per_call_error'),
      'Theorem 3.8': number('predicted_theorem_3_8'),
      'from costs': number('predicted_from_costs'),
      'our measured': number('speedup', 2, 'speedup_error'),
      'off by, theorem': _off('predicted_theorem_3_8'),
      'off by, costs': _off('predicted_from_costs'),
      'best γ here': number('best_gamma_here', 0),
      'examples': number('examples', 0),
    }
    | _END,
  )(root)
  rows = tables.table4(root)
  near = lambda predicted, measured, real: sum(
    abs(row[predicted] / row[measured] - 1) <= 0.1 for row in real
  )
  # A published row appears once for each record beside it.
  published = {
    (row['task'], row['draft'], row['temperature']): row
    for row in rows
    if 'published_expected' in row
  }.values()
  ours = [row for row in rows if 'speedup' in row and not tables.simulated(row)]
  by_theorem = near('predicted_theorem_3_8', 'speedup', ours)
  by_costs = near('predicted_from_costs', 'speedup', ours)
  in_paper = near('published_expected', 'published_measured', published)
  return body + (
    '\n\nWithin 10 % of the measured speed-up: the prediction from costs in'
    f' {by_costs} and Theorem 3.8 in {by_theorem} of our {len(ours)} measured'
    f' rows, simulations apart; Theorem 3.8 in {in_paper} of the'
    f' {len(published)} published rows.'
  )


def sample(root: str) -> str:
  """The example of figure 1, a line per target call, with marks."""
  result = tables.newest(root, 'figure1')['results']['trace']
  lines = [
    ''.join(marks.marked(token['what'], token['text']) for token in block)
    for block in result['blocks']
  ]
  text = '\n'.join(lines)
  return (
    f'> {result["inputs"]}\n\n```\n{text}\n```\n\n{_pair(result)}.'
    f' {marks.LEGEND[0].upper()}{marks.LEGEND[1:]}.'
  )


def _pair(result: dict[str, Any]) -> str:
  """What a trace is of."""
  return (
    f'{result["target"]} with {result["draft"]}, {result["task"]}, temperature'
    f' {result["temperature"]:g}, γ {result["gamma"]}'
  )


def _figure1(root: str) -> str:
  record = tables.newest(root, 'figure1')
  result = record['results']['trace']
  tokens = sum(
    token['what'] not in ('rejected', 'unread')
    for block in result['blocks']
    for token in block
  )
  return (
    f'{_pair(result)}:'
    f' {len(result["blocks"])} target calls for {tokens} tokens (the'
    f" paper's example: 9 for 38), n = 1 example, {tables.machine(record)}."
    f' Status: {tables.status(root, record)}.\n\n{sample(root)}'
  )


def _figure5(root: str) -> str:
  record = tables.newest(root, 'figure5')
  rows = []
  for line in record['results']['timeline']['lines']:
    spans = line['spans']
    total = {
      kind: 1e3 * sum(end - begin for k, begin, end in spans if k == kind)
      for kind in figures.CALLS
    }
    begin, end = spans[0][1], spans[-1][2]
    total['between'] = 1e3 * (end - begin) - sum(total.values())
    rows.append(
      {
        'γ': str(line['gamma']) if line['gamma'] else 'standard',
        'tokens': str(line['tokens']),
        'target calls': str(line['target_calls']),
        'ms': f'{1e3 * line["seconds"]:.1f}',
        **{f'{kind}, ms': f'{value:.1f}' for kind, value in total.items()},
      }
    )
  work = record['results']['workload']
  return (
    f'{work["target"]} with {work["draft"]}, {work["task"]}, temperature'
    f' {work["temperature"]:g}; n = 1 example, {tables.machine(record)}.'
    f' Status: {tables.status(root, record)}. "ms" is a run without the'
    ' profiler; the columns after it are of another run, under it. A draft call'
    ' lasts until the next call begins, so drawing its guess is in it.'
    ' "between" is what neither model does: setting up, the test of the'
    f' guesses, the extra token, bookkeeping.\n\n{markdown(rows)}'
  )


def _curves(root: str, folder: str) -> str:
  record = tables.newest(root, folder)
  del record['results']['curves']['alpha']
  curves = [
    f'{name}: {", ".join(values) if isinstance(values, dict) else "one curve"}'
    for name, values in record['results']['curves'].items()
  ]
  return (
    f'Status: reproduced, from `spec_decode/theory.py` ({"; ".join(curves)}).'
    ' Nothing is sampled or timed: no n, no error, the same on any hardware.'
  )


PAGES = {
  'table1': Page(
    'Table 1: operations and speed',
    'Theory for c = ĉ = 0: how arithmetic grows and walltime falls.',
    _table(
      tables.table1,
      {
        'α': number('alpha'),
        'γ': number('gamma', 0),
        'published operations': number('published_operations'),
        'operations': number('operations'),
        'published speed': number('published_speed'),
        'speed': number('speed'),
        'n': number('n'),
        'hardware': number('hardware'),
        'status': number('status'),
      },
    ),
    figures.table1,
  ),
  'table2': Page(
    'Table 2: walltime',
    'Speed-up per token of the decoding loop, encoders apart, batch 1. The'
    " paper measures against T5X's decoding on a TPU v4; ours is against plain"
    ' decoding by this package on the hardware named. ± is one standard error'
    ' over examples; n is their number.',
    _table(
      tables.table2,
      _COMMON
      | {
        'published γ, α': _settings('alpha'),
        'published speed': number('published_speed', 1),
        'our γ': number('gamma', 0),
        'our α': number('alpha', 3, 'alpha_error'),
        'our speed': number('speedup', 2, 'speedup_error'),
        'examples': number('examples', 0),
      }
      | _END,
    ),
    figures.table2,
  ),
  'table3': Page(
    'Table 3: α',
    'Mean of Σ min(p, q) over text that the target generated, both models'
    ' teacher-forced. ± is one standard error, examples being the clusters.'
    ' The columns from γ on are counts of a speculative run over so many'
    ' examples. At temperature 0 the rows without an encoder go on from the'
    ' first 8 tokens of a text, since unconditional greedy samples are all'
    ' alike; the published ones there are unconditional.',
    _table3,
    figures.table3,
  ),
  'table4': Page(
    'Table 4: expected and measured walltime',
    'Two predictions of the measured speed-up: Theorem 3.8 with our α and c, as'
    ' in the paper; and tokens per call of the timed runs over what a block'
    ' costs, (γ c + T(γ+1)/T(1)). c is measured inside the loop; "c alone" is'
    ' the draft by itself, ± one standard error over repeats. "best γ here" is'
    ' the best of 1, 3 and 7 for these costs if guesses were as often right as'
    ' in the timed runs, 0 where none pays.',
    _table4,
    figures.table4,
  ),
  'table5': Page(
    'Table 5: lenience',
    'α when a guess is accepted with probability min(1, p / (l q)); at'
    ' temperature 0, when p(x) ≥ l max p.',
    _table(
      tables.table5,
      _COMMON | {'l': number('lenience', 0)} | _ALPHA | _END,
    ),
    figures.table5,
  ),
  'figure1': Page(
    'Figure 1: one sample, a line per iteration',
    'What speculative decoding does to one example.',
    _figure1,
    figures.figure1,
  ),
  'figure2': Page(
    'Figure 2: tokens per iteration',
    'Expected tokens per target call against α, equation (1).',
    lambda root: _curves(root, 'figure2'),
    figures.figure2,
  ),
  'figure3': Page(
    'Figure 3: best γ',
    'The γ that maximises Theorem 3.8 against α, for several c.',
    lambda root: _curves(root, 'figure3'),
    figures.figure3,
  ),
  'figure4': Page(
    'Figure 4: speed and operations',
    'Theorems 3.8 and 3.11 against α for c = ĉ = 0.',
    lambda root: _curves(root, 'figure4'),
    figures.figure4,
  ),
  'figure5': Page(
    'Figure 5: a timeline of calls',
    'When the encoders, the draft and the target ran, from the profiler.',
    _figure5,
    figures.figure5,
  ),
}
