# SPDX-License-Identifier: Apache-2.0
"""A trace as one self-contained page: `page` of what `trace.measure` returns.

Every token wears a mark besides its colour, so the page reads in black and
white; pointing at a token, or tabbing to it, shows its numbers and its call.
"""

import html
import itertools
import string
from typing import Any

from spec_decode.report import figures

# What happened to a token -> (mark before it, what it means).
MARKS = {
  'accepted': ('', 'guess, accepted'),
  'rejected': ('✗', 'guess, rejected'),
  'unread': ('·', 'guess after a rejection, thrown away'),
  'correction': ('↳', 'token of the target in place of a rejected guess'),
  'bonus': ('+', 'token of the target after all guesses were accepted'),
}
_WIDTH, _HEIGHT = 1000, 46  # of the timeline, in its own units


def page(trace: dict[str, Any]) -> str:
  """HTML of a trace; all text of models and data is escaped."""
  blocks = trace['blocks']
  kept = [
    (token, i)
    for i, block in enumerate(blocks)
    for token in block
    if token['what'] in _COMMITTED
  ]
  simulated = ''
  if trace['replay'] is not None:
    simulated = f'Simulated: guesses accepted at {trace["replay"]:g}. '
  summary = (
    f'{simulated}{trace["task"]}, target {trace["target"]}, draft'
    f' {trace["draft"]}, temperature {trace["temperature"]:g}, gamma'
    f' {trace["gamma"]}, lenience {trace["lenience"]:g}: {len(blocks)} target'
    f' calls for {len(kept)} tokens.'
  )
  return string.Template(_PAGE).substitute(
    styles='\n'.join(
      f'.{what} {{ color: {color}; }} .bar.{what} {{ fill: {color}; }}'
      for what, color in figures.TOKENS.items()
    ),
    example=html.escape(trace['example']),
    inputs=html.escape(trace['inputs']),
    summary=html.escape(summary),
    legend=' '.join(
      f'<li><span class="t {what}">{_marked(what, what)}</span>'
      f' {html.escape(meaning)}</li>'
      for what, (_, meaning) in MARKS.items()
    ),
    text=''.join(itertools.starmap(_token, kept)),
    blocks='\n'.join(
      f'<tr data-call="{i}"><th>{i + 1}</th><td>'
      + ''.join(_token(token, i) for token in block)
      + '</td></tr>'
      for i, block in enumerate(blocks)
    ),
    timeline=_timeline(trace['profile']),
  )


_COMMITTED = ('accepted', 'correction', 'bonus')


def _marked(what: str, text: str) -> str:
  mark = MARKS[what][0]
  # A lone space would not be seen, and one at the edge would fold.
  seen = '␣' if text == ' ' else text.replace(' ', '\u00a0') or '∅'
  return (f'<i>{mark}</i>' if mark else '') + html.escape(seen)


def _token(token: dict[str, Any], call: int) -> str:
  """One token, with its numbers and its call."""
  what = token['what']
  numbers = ', '.join(
    f'{label} = {token[name]:.4g}'
    for name, label in (('p', 'p'), ('q', 'q'), ('beta', 'β'))
    if name in token
  )
  if 'q' not in token:
    numbers += ', no q or β: the draft guessed nothing here'
  said = html.escape(
    f'“{token["text"]}” (id {token["id"]}): {MARKS[what][1]}; {numbers};'
    f' call {call + 1}'
  )
  return (
    f'<span class="t {what}" tabindex="0" data-call="{call}" title="{said}"'
    f' data-said="{said}">{_marked(what, token["text"])}</span>'
  )


def _timeline(profile: dict[str, Any]) -> str:
  """Calls over time as SVG: the target above, the draft below."""
  spans = profile['spans']
  total = max((end for _, _, end in spans), default=1.0) or 1.0
  bars, call = [], 0
  for kind, begin, end in spans:
    top = 2 if kind.startswith('target') else 24
    color = figures.CALLS[kind][0]
    height, number, name = 20, call, f'{kind}, call {call + 1}'
    if 'encoder' in kind:
      height, number, name = 10, -1, kind
    said = html.escape(f'{name}: {1e3 * (end - begin):.2f} ms')
    bars.append(
      f'<rect class="call" x="{_WIDTH * begin / total:.2f}" y="{top}"'
      f' width="{max(_WIDTH * (end - begin) / total, 0.6):.2f}"'
      f' height="{height}" fill="{color}" data-call="{number}"'
      f' data-said="{said}"><title>{said}</title></rect>'
    )
    call += kind == 'target'
  return (
    f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none"'
    f' role="img" aria-label="timeline">{"".join(bars)}</svg>'
    '<p class="axis"><span>0 ms</span><span>upper row: target, lower row:'
    ' draft; half as high: encoders; between calls: the test of the guesses and'
    ' bookkeeping</span><span>'
    f'{1e3 * total:.1f} ms, under the profiler</span></p>'
  )


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Trace of $example</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto;
  max-width: 68rem; padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.25rem; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
blockquote { margin: .4rem 0; padding-left: .8rem; border-left: 3px solid #ccc;
  overflow-wrap: anywhere; }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap;
  gap: .2rem 1.2rem; margin: .3rem 0; font-size: .85rem; color: #444; }
.t { font: 15px/1.35 ui-monospace, monospace; padding: 1px 2px; margin: 2px 1px;
  border-radius: 3px; white-space: pre; display: inline-block; }
.t i { font-style: normal; margin-right: 1px; display: inline-block; }
.rejected { text-decoration: line-through; }
.unread { font-style: italic; }
.correction { border-bottom: 2px solid; font-weight: 600; }
.bonus { border: 1px solid; font-weight: 600; }
$styles
table { border-collapse: collapse; width: 100%; }
th { width: 2.5rem; text-align: right; padding-right: .6rem; color: #777;
  font-weight: 400; vertical-align: baseline; }
tr.on, .t.on { background: #fff3c4; }
.t:focus { outline: 2px solid #222; }
svg { width: 100%; height: 5rem; background: #f6f6f6; display: block; }
.call.on { stroke: #222; stroke-width: 1.5; }
.axis { display: flex; justify-content: space-between; gap: 1rem;
  margin: .2rem 0; font-size: .8rem; color: #555; }
#said { position: sticky; top: 0; background: #fff; padding: .4rem 0;
  min-height: 1.5rem; border-bottom: 1px solid #ddd; }
</style>
<h1>$example</h1>
<p>$summary</p>
<blockquote>$inputs</blockquote>
<p id="said" aria-live="polite">Point at a token or a call, or press Tab.</p>
<ul>$legend</ul>
<h2>Output</h2>
<p>$text</p>
<h2>A line per target call</h2>
<table>$blocks</table>
<h2>Calls over time</h2>
$timeline
<script>
const said = document.getElementById('said');
const all = document.querySelectorAll('[data-call]');
function show(event) {
  const from = event.target.closest('[data-said]');
  if (!from) return;
  said.textContent = from.dataset.said;
  for (const other of all) other.classList.toggle('on',
    other.dataset.call === from.dataset.call);
}
document.addEventListener('mouseover', show);
document.addEventListener('focusin', show);
</script>
</html>
"""
