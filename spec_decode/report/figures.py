# SPDX-License-Identifier: Apache-2.0
"""Pictures of the tables and figures, from the same records.

Every function takes the folder `experiments` and returns a Matplotlib figure.
Lines differ in marker or dash as well as in colour.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
import numpy as np

from spec_decode.report import tables

_MARKERS = 'osD^vPX'
_DASHES = ('-', '--', '-.', ':', (0, (5, 1, 1, 1, 1, 1)))
# What happened to a token -> colour.
TOKENS = {
  'accepted': '#1b7837',
  'rejected': '#b2182b',
  'unread': '#707070',
  'correction': '#2166ac',
  'bonus': '#762a83',
}
CALLS = {
  'target encoder': ('#4393c3', '//'),
  'draft encoder': ('#fdb863', '//'),
  'draft': ('#e08214', ''),
  'target': ('#2166ac', ''),
}


def _axes(width=6.0, height=3.4, **kwargs):
  figure = Figure(figsize=(width, height), layout='constrained')
  return figure, figure.subplots(**kwargs)


def table1(root: str) -> Figure:
  """Operations and speed, ours beside the published."""
  return _grouped(
    [row for row in tables.table1(root) if 'speed' in row],
    lambda row: f'α {row["alpha"]:g}\nγ {row["gamma"]}',
    {
      f'{prefix}{name}': f'{word}{name}'
      for name in ('speed', 'operations')
      for prefix, word in (('published_', 'published '), ('', ''))
    },
    'factor over standard decoding',
  )


def table2(root: str) -> Figure:
  rows, axis = tables.table2(root), 'speed-up over plain decoding'
  return _beside_published(rows, 'published_speed', 'speedup', axis)


def table3(root: str) -> Figure:
  return _beside_published(tables.table3(root), 'published_alpha', 'alpha', 'α')


def table4(root: str) -> Figure:
  """Both predictions against the measured speed-up."""
  rows = _measured(tables.table4(root), 'speedup')
  figure, axes = _axes(4.6, 4.2)
  for name, label, markers in (
    ('predicted_theorem_3_8', 'Theorem 3.8', 'os'),
    ('predicted_from_costs', 'from measured costs', 'x+'),
  ):
    for simulated, marker in zip((False, True), markers):
      some = [row for row in rows if tables.simulated(row) == simulated]
      if some:
        axes.plot(
          _column(some, 'speedup'), _column(some, name), marker,
          label=label + simulated * ', simulated',
        )  # fmt: skip
  low, high = axes.get_xlim()
  line = np.linspace(min(low, 0.5), high, 2)
  axes.plot(line, line, color='black', linewidth=0.8, label='equal')
  axes.fill_between(
    line, 0.9 * line, 1.1 * line, color='#dddddd', label='within 10 %'
  )
  axes.set(xlabel='measured speed-up', ylabel='predicted')
  axes.legend(fontsize=8)
  return figure


def table5(root: str) -> Figure:
  """alpha against lenience, one line per draft and temperature."""
  figure, axes = _axes(6.4, 3.6)
  lines: dict[tuple, list] = {}
  for row in _measured(tables.table5(root), 'alpha'):
    if 'published_alpha' in row:
      key = row['draft'], row['temperature']
      lines.setdefault(key, []).append(row)
  for i, ((draft, temperature), rows) in enumerate(lines.items()):
    x = [row['lenience'] for row in rows]
    style = {'color': f'C{i}', 'marker': _MARKERS[i % len(_MARKERS)]}
    axes.errorbar(
      x, _column(rows, 'alpha'), _column(rows, 'alpha_error'),
      label=f'{draft}, T={temperature:g}', **style,
    )  # fmt: skip
    axes.plot(
      x,
      [row['published_alpha'] for row in rows],
      ':',
      markerfacecolor='none',
      label='published' if i == 0 else None,
      **style,
    )
  axes.set(xlabel='lenience l', ylabel='α')
  axes.invert_xaxis()
  axes.legend(fontsize=7, loc='center left', bbox_to_anchor=(1.0, 0.5))
  return figure


def figure1(root: str) -> Figure:
  """One line per iteration, each token marked by what happened to it."""
  blocks = _result(root, 'figure1', 'trace')['blocks']
  legend = [{'what': what, 'text': f'{what} '} for what in TOKENS]
  longest = max(sum(map(_width, block)) for block in [*blocks, legend])
  # A monospaced character is 0.602 of its size wide.
  size = 8.0
  figure = Figure((0.602 * size / 72 * (longest + 2), 0.2 * len(blocks) + 0.5))
  axes = figure.add_axes((0, 0, 1, 1))
  axes.axis('off')
  axes.set(xlim=(-1, longest + 1), ylim=(len(blocks) + 1.5, -1))
  for line, block in enumerate(blocks):
    _write(axes, block, line, size)
  _write(axes, legend, len(blocks) + 0.6, size)
  return figure


def _width(token: dict[str, str]) -> int:
  return len(token['text']) + 2 * (token['what'] == 'unread')


def _write(axes, tokens, line: float, size: float) -> None:
  """One line of text, a unit per character, marked under and through."""
  column = 0
  for token in tokens:
    what, text, width = token['what'], token['text'], _width(token)
    if what == 'unread':
      text = f'({text})'
    color, left, right = TOKENS[what], column, column + width
    axes.text(
      left, line, text, color=color, family='monospace', fontsize=size,
      va='center', parse_math=False,
    )  # fmt: skip
    heights = {
      'rejected': (0.0,), 'correction': (0.38,), 'bonus': (0.34, 0.46),
    }  # fmt: skip
    for height in heights.get(what, ()):
      axes.plot(
        [left + 0.1, right - 0.1], [line + height] * 2, color=color,
        linewidth=0.9,
      )  # fmt: skip
    column += width


def figure2(root: str) -> Figure:
  result = _result(root, 'figure2', 'curves')
  figure, axes = _axes()
  for i, (gamma, values) in enumerate(result['tokens'].items()):
    axes.plot(result['alpha'], values, linestyle=_line(i), label=f'γ = {gamma}')
  axes.plot(result['alpha'], result['oracle'], 'k', label='oracle', alpha=0.5)
  axes.set(xlabel='α', ylabel='tokens per iteration', ylim=(0, 12))
  axes.legend(fontsize=8)
  return figure


def figure3(root: str) -> Figure:
  result = _result(root, 'figure3', 'curves')
  figure, axes = _axes()
  for i, (c, values) in enumerate(result['gamma'].items()):
    axes.step(
      result['alpha'], values, linestyle=_line(i), where='mid', label=f'c = {c}'
    )
  axes.set(xlabel='α', ylabel='best γ', ylim=(0, 30))
  axes.legend(fontsize=8)
  return figure


def figure4(root: str) -> Figure:
  result = _result(root, 'figure4', 'curves')
  figure, axes = _axes(7.2, 3.4, ncols=2)
  for ax, name in zip(axes, ('speed', 'operations')):
    for i, (gamma, values) in enumerate(result[name].items()):
      ax.plot(result['alpha'], values, linestyle=_line(i), label=f'γ = {gamma}')
    ax.set(xlabel='α', ylabel=f'{name}, c = 0')
  axes[0].legend(fontsize=8)
  return figure


def figure5(root: str) -> Figure:
  """Calls over time, one row per gamma."""
  lines = _result(root, 'figure5', 'timeline')['lines']
  figure, axes = _axes(8.0, 0.75 * len(lines) + 1.2)
  for i, line in enumerate(lines):
    for kind, (color, hatch) in CALLS.items():
      bars = [
        (b * 1e3, (e - b) * 1e3) for k, b, e in line['spans'] if k == kind
      ]
      low = i - 0.3 if kind.startswith('target') else i
      # Edges would cover calls as short as a draft's.
      edge = 0 if kind == 'draft' else 0.3
      axes.broken_barh(
        bars, (low, 0.3), facecolors=color, hatch=hatch, edgecolor='white',
        linewidth=edge, label=kind if i == 0 else None,
      )  # fmt: skip
  axes.set_yticks(
    range(len(lines)),
    [f'γ = {line["gamma"]}' if line['gamma'] else 'standard' for line in lines],
  )
  axes.invert_yaxis()
  axes.set(
    xlabel='milliseconds, under the profiler; white: what neither model does'
  )
  axes.legend(
    fontsize=8, ncols=4, loc='upper center', bbox_to_anchor=(0.5, 1.3)
  )
  return figure


def _line(i: int) -> Any:
  return _DASHES[i % len(_DASHES)]


def _result(root: str, folder: str, job: str) -> dict[str, Any]:
  return tables.newest(root, folder)['results'][job]


def _measured(rows: Sequence[tables.Row], name: str) -> list[tables.Row]:
  return [row for row in rows if name in row]


def _pair_label(row: tables.Row) -> str:
  draft = row['draft'].replace(' (', '\n(')  # the size on its own line
  simulated = '\nsimulated' if tables.simulated(row) else ''
  return f'{row["task"]}\n{draft}\nT={row["temperature"]:g}{simulated}'


def _beside_published(rows, published: str, ours: str, axis: str) -> Figure:
  """Our values, with their errors, beside the published ones."""
  return _grouped(
    _measured(rows, ours),
    _pair_label,
    {published: 'published', ours: 'ours in its place'},
    axis,
    {ours: f'{ours}_error'},
  )


def _column(rows, name: str) -> np.ndarray:
  """Values of all rows, NaN where a row has none."""
  return np.array([row.get(name) for row in rows], float)


def _grouped(rows, label, series, axis, errors=()) -> Figure:
  """Bars side by side, one group per row."""
  figure, axes = _axes(max(6.0, 0.62 * len(rows)), 3.6)
  place = np.arange(len(rows))
  width = 0.8 / len(series)
  for i, (name, title) in enumerate(series.items()):
    values = _column(rows, name)
    error = _column(rows, errors[name]) if name in errors else None
    axes.bar(
      place + (i - 0.5 * (len(series) - 1)) * width, values, width, yerr=error,
      label=title, hatch=('', '//')[i % 2], edgecolor='white',
    )  # fmt: skip
  axes.set_xticks(place, [label(row) for row in rows], fontsize=6)
  axes.set_ylabel(axis)
  axes.legend(fontsize=8)
  return figure
