# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md and the pages of experiments/, from records.

python scripts/make_tables.py          rewrites them, README.md between marks
python scripts/make_tables.py --check  fails if that would change anything
"""

from collections.abc import Sequence
import pathlib
import re
import sys
from typing import Any

from absl import app
from absl import flags

from spec_decode import records
from spec_decode.report import contents
from spec_decode.report import pages
from spec_decode.report import tables

_CHECK = flags.DEFINE_bool('check', False, 'Compare, write nothing.')
_ROOT = pathlib.Path(__file__).parent.parent
_EXPERIMENTS = str(_ROOT / 'experiments')


def _records(folder: str) -> list[dict[str, Any]]:
  """The newest record of each configuration; FileNotFoundError without any."""
  found = tables.read(_EXPERIMENTS, folder)
  if not found:
    raise FileNotFoundError(folder)
  return found


def speculation() -> str:
  """One row per task, draft and temperature: table 4 in short."""
  rows = []
  # Simulations have a place in the table's own page only.
  found = [
    record
    for record in _records('table4')
    if record['results']['workload']['replay'] is None
  ]
  # A sweep that was gone on with leaves its rows in another order.
  place = lambda work: (work['task'], work['temperature'])
  found.sort(key=lambda record: place(record['results']['workload']))
  for record in found:
    results = record['results']
    work, times = results['workload'], results['walltime']
    alpha = results['acceptance_rate']
    rows.append(
      {
        'task': work['task'],
        'draft': work['draft'],
        'temperature': f'{work["temperature"]:g}',
        'gamma': str(work['gamma']),
        'alpha': tables.with_error(alpha['alpha'], alpha['standard_error'], 3),
        'tokens per call': tables.with_error(
          times['tokens_per_call'], times['tokens_per_call_error'], 2
        ),
        'c': tables.with_error(times['c'], times.get('c_error'), 3),
        'theorem 3.8': f'{times["predicted_theorem_3_8"]:.2f}',
        'from costs': f'{times["predicted_from_costs"]:.2f}',
        'measured': tables.with_error(
          times['speedup'], times['speedup_error'], 2
        ),
      }
    )
  return _measured(found, rows)


def benchmark() -> str:
  """One row per pair, batch size and gamma."""
  rows = []
  newest = {}
  for record in records.read(_ROOT / 'experiments/benchmark/records.jsonl'):
    result = record['results']['benchmark']
    newest[result['target'], result['draft']] = record
  found = []
  for record in newest.values():
    results = record['results']['benchmark']
    for row in results['rows']:
      found.append(record)
      single = row['batch_size'] == 1
      wide = results['wide_over_one']
      rows.append(
        {
          'target': results['target'],
          'draft': results['draft'],
          'batch': str(row['batch_size']),
          'plain step, ms': f'{row["plain_step_ms"]:.2f}',
          'weights read at': f'{100 * results["bandwidth_used"]:.0f} %'
          if single
          else '',
          'T(4), T(8) / T(1)': f'{wide["4"]:.2f}, {wide["8"]:.2f}'
          if single
          else '',
          'capacity 512 / 64': f'{results["capacity_ratio"]:.2f}'
          if single
          else '',
          'c': tables.with_error(row['c'], row.get('c_error'), 3),
          'iteration / its calls': f'{row["overhead"]:.2f}',
        }
      )
  return _measured(found, rows)


def sample() -> str:
  """The output of figure 1, block by block."""
  return contents.sample(_EXPERIMENTS)


def quickstart() -> str:
  """What the first command measures."""
  record = tables.newest(_EXPERIMENTS, 'quickstart')
  results = record['results']
  alpha, times = results['acceptance_rate'], results['walltime']
  decoded = results['generate']
  error = tables.with_error(alpha['alpha'], alpha['standard_error'], 3)
  per_call = tables.with_error(
    decoded['tokens_per_call'], decoded['tokens_per_call_error'], 2
  )
  speedup = tables.with_error(times['speedup'], times['speedup_error'], 2)
  return (
    f'On {tables.machine(record)}: alpha {error}, {per_call} tokens per target'
    f' call, c {times["c"]:.3f}, measured speed-up {speedup}'
    f' ({times["examples"]} examples), {decoded["differing_outputs"]} of'
    f' {decoded["examples"]} outputs unlike plain decoding.'
  )


def exactness() -> str:
  """What the proof came to."""
  # With replay the rule is broken on purpose.
  record = tables.newest(_EXPERIMENTS, 'exactness', replay=None)
  found = record['results']['exactness']
  differing = sum(row['differing'] for row in found['ids'])
  tests = [
    row[name]['p_value']
    for row in found['law']
    for name in ('first_token', 'all_tokens')
  ]
  return (
    f'On {tables.machine(record)}: {differing} outputs differ, of'
    f' {found["ids"][0]["examples"]} examples in {len(found["ids"])} settings'
    f' each; {len(tests)} p-values, of {found["law"][0]["n"]} samples each,'
    f' from {min(tests):.2g} to {max(tests):.2g}.'
  )


def quality() -> str:
  """BLEU or ROUGE-L of every network alone."""
  rows = []
  found = _records('quality')
  for record in found:
    decoded = record['results']['generate']
    metric = 'bleu' if 'bleu' in decoded else 'rouge_l'
    rows.append(
      {
        'network': record['results']['workload']['target'],
        'task': record['results']['workload']['task'],
        'score': f'{decoded[metric]:.1f} {metric}',
        'examples': str(decoded['examples']),
      }
    )
  return contents.markdown(rows)


def t5x() -> str:
  """Milliseconds per token beside stock T5X, one row per pair."""
  rows = []
  found = _records('t5x_walltime')
  for record in found:
    work = record['results']['workload']
    times = record['results']['t5x_walltime']
    ms, per_call = times['ms_per_token'], times['tokens_per_call']
    random = ', random weights' if work.get('random_weights') else ''
    rows.append(
      {
        'target': work['target'] + random,
        'draft': work['draft'],
        'temperature': f'{work["temperature"]:g}',
        'gamma': str(work['gamma']),
        'stock, ms per token': f'{ms["stock"]:.2f}',
        'with a look-up': f'{ms["stock_gather"]:.2f}',
        'stock / look-up': f'{ms["stock"] / ms["stock_gather"]:.2f}',
        'our plain': f'{ms["plain"]:.2f}',
        'speculative': f'{ms["speculative"]:.2f}',
        'look-up / it': f'{ms["stock_gather"] / ms["speculative"]:.2f}',
        'plain / it': f'{ms["plain"] / ms["speculative"]:.2f}',
        'tokens per call': f'{per_call:.2f}',
        'examples': str(times['examples']),
      }
    )
  return _measured(found, rows)


def agreement() -> str:
  """Greedy outputs beside stock T5X's, a sentence per dtype."""
  newest = {
    record['results']['t5x_agreement']['dtype']: record
    for record in records.read(
      _ROOT / 'experiments/t5x_agreement/records.jsonl'
    )
  }
  lines = []
  for dtype, record in newest.items():
    found = record['results']['t5x_agreement']
    line = (
      f'In {dtype}, {found["identical"]} of {found["examples"]} greedy outputs'
      f' are those of stock T5X ({tables.machine(record)})'
    )
    if gaps := found['logit_gaps']:
      line += (
        f'; where one first differs, its two logits are {max(gaps):.2g} apart'
        ' or less'
      )
    lines.append(f'{line}.')
  return ' '.join(lines)


def _measured(found, rows) -> str:
  """The rows and where they were measured; `found` has the record of each."""
  if not rows:
    return 'Not measured yet.'
  where, rows = tables.by_machine(found, rows)
  return f'Measured on {where}.\n\n{contents.markdown(rows)}'


def paper() -> str:
  """What became of every table and figure of the paper."""
  return pages.index(_EXPERIMENTS, 'experiments/')


SECTIONS = {
  'sample': sample,
  'quickstart': quickstart,
  'exactness': exactness,
  'speculation': speculation,
  'quality': quality,
  't5x': t5x,
  'agreement': agreement,
  'benchmark': benchmark,
  'paper': paper,
}


def rewritten(text: str) -> str:
  """`text` with every marked section made anew."""
  for name, make in SECTIONS.items():
    mark = re.compile(f'(<!-- {name} -->\n).*?(<!-- /{name} -->)', re.DOTALL)
    if not mark.search(text):
      raise ValueError(f'Expected marks <!-- {name} --> in README.md.')
    try:
      section = make()
    except FileNotFoundError:
      section = 'Not measured yet.'
    text = mark.sub(lambda m, new=section: f'{m[1]}{new}\n{m[2]}', text)
  return text


def main(argv: Sequence[str]) -> None:
  del argv
  path = _ROOT / 'README.md'
  old = path.read_text(encoding='utf-8')
  new = rewritten(old)
  if not _CHECK.value:
    path.write_text(new, encoding='utf-8')
    pages.write(_EXPERIMENTS)
    return
  stale = pages.stale(_EXPERIMENTS) + ([str(path)] if old != new else [])
  if stale:
    sys.exit(f'Not what the records say, run make_tables.py: {stale}')


if __name__ == '__main__':
  app.run(main)
