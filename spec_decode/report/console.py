# SPDX-License-Identifier: Apache-2.0
"""What a run shows on the screen when it ends."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec_decode.report import tables
from spec_decode.workload import Workload


def show(workload: Workload, results: dict[str, Any]) -> None:
  """Prints the table that a person reads."""
  rate, times = results.get('acceptance_rate'), results.get('walltime')
  decoded = results.get('generate')
  cells = {
    'task': workload.prompts.task,
    'target': workload.target.name,
    'draft': workload.draft.name,
    'temperature': f'{workload.temperature:g}',
  }
  if 'exactness' not in results:
    cells['gamma'] = str(workload.gamma)
  if workload.replay is not None:
    cells['simulated'] = f'guesses accepted at {workload.replay:g}'
  if rate:
    cells['alpha'] = (
      f'{tables.with_error(rate["alpha"], rate["standard_error"], 3)}'
      f' ({rate["tokens"]} tokens, {rate["examples"]} examples)'
    )
  if decoded:
    cells['tokens per target call'] = tables.with_error(
      decoded['tokens_per_call'], decoded['tokens_per_call_error'], 2
    )
    for key, label in (('bleu', 'BLEU'), ('rouge_l', 'ROUGE-L')):
      if key in decoded:
        cells[label] = f'{decoded[key]:.1f}'
    if 'differing_outputs' in decoded:
      cells['outputs unlike plain decoding'] = (
        f'{decoded["differing_outputs"]} of {decoded["examples"]}'
      )
  if times:
    cells |= _time_cells(times)
  table = Table(title='Speculative decoding', show_header=False)
  for name, value in cells.items():
    table.add_row(name, Text(value))
  screen = Console()
  screen.print()
  screen.print(table)
  if times and 'warning' in times:
    screen.print(Text(times['warning'], style='yellow'))
  if 'exactness' in results:
    for each in _exactness(results['exactness']):
      screen.print(each)


def _time_cells(times: dict[str, Any]) -> dict[str, str]:
  theorem = times['predicted_theorem_3_8']
  return {
    'c, in the loop': f'{tables.with_error(times["c"], times["c_error"], 3)}'
    f' (alone {times["c_alone"]:.3f})',
    'T(gamma + 1) / T(1)': f'{times["wide_ratio"]:.2f}',
    'predicted speed-up, theorem 3.8': '-'
    if theorem is None
    else f'{theorem:.2f}x',
    'predicted speed-up, from costs': f'{times["predicted_from_costs"]:.2f}x',
    'measured speed-up': f'{times["speedup"]:.2f}x'
    f'{tables.plus_minus(times["speedup_error"], 2)} over plain decoding'
    f' ({times["speedup_with_encoder"]:.2f}x with the encoders)',
  }


def _exactness(found: dict[str, Any]) -> tuple[Table, Table]:
  """Ids a line for each kind of batch, law for each prompt and gamma."""
  rows = found['ids']
  ids = Table(
    title=f'Temperature 0: of {rows[0]["examples"]} examples, those unlike'
    ' plain decoding'
  )
  for name in (
    'batch',
    'pad',
    *(f'γ {gamma}' for gamma in dict.fromkeys(r['gamma'] for r in rows)),
    'gaps',
  ):
    ids.add_column(name, justify='right')
  kind = lambda row: (row['batch_size'], row['padding'])
  for each in dict.fromkeys(map(kind, rows)):
    alike = [row for row in rows if kind(row) == each]
    gaps = sorted(gap for row in alike for gap in row['logit_gaps'])
    ids.add_row(
      *map(str, each),
      *(str(row['differing']) for row in alike),
      ', '.join(f'{gap:.2g}' for gap in gaps),
    )
  law = Table(title='Samples: chi-squared (degrees of freedom), p-value')
  law.add_column('prompt', overflow='fold')
  for name in (
    'gamma', 'n', 'first token, exact law', 'all tokens, plain samples',
  ):  # fmt: skip
    law.add_column(name, justify='right')
  for row in found['law']:
    law.add_row(
      row['prompt'],
      str(row['gamma']),
      str(row['n']),
      *(
        f'{test["statistic"]:.1f} ({test["degrees_of_freedom"]}),'
        f' {test["p_value"]:.2g}'
        for test in (row['first_token'], row['all_tokens'])
      ),
    )
  return ids, law
