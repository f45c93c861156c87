# SPDX-License-Identifier: Apache-2.0
"""When each call of a decode ran, from the profiler (figure 5).

The compiled loops of `autoregressive` and `speculative` run as they are. Their
models are named while they are traced; XLA keeps the names of what became of
them, the profiler says when those ran.
"""

from collections.abc import Iterator
import dataclasses
import itertools
import pathlib
import re
import tempfile
import time
from typing import Any

import jax

from spec_decode import autoregressive
from spec_decode import checks
from spec_decode import speculative
from spec_decode.drafts import ModelDraft
from spec_decode.language_model import LanguageModel
from spec_decode.workload import Workload

KINDS = ('target encoder', 'draft encoder', 'draft', 'target')
Place = tuple[str, bool]  # one of `KINDS`, whether in a loop of its own
_OWN_LOOP = 'draft', True
# Instructions that only contain others.
_CONTAINERS = ('while', 'call', 'conditional')


@dataclasses.dataclass
class Span:
  """One call, in seconds since the first began."""

  kind: str
  begin: float
  end: float


def problems(workload: Workload, example: int, **arguments) -> list[str]:
  """What there is nothing to profile of."""
  found = checks.below(0, arguments, 'gammas')
  if workload.prompts.problems():
    return found  # which says enough
  number = len(workload.prompts.examples)
  if not 0 <= example < number:
    found.append(
      f'Expected example in 0..{number - 1}, those of {workload.prompts.task},'
      f' got {example}. Choose one of these.'
    )
  return found


def measure(
  workload: Workload,
  output_dir: str,
  earlier: dict[str, Any] | None = None,
  gammas: tuple[int, ...] = (7, 3, 0),
  example: int = 0,
) -> dict[str, Any]:
  """Profiles one example, decoded with each gamma; 0 is plain decoding.

  Args:
    workload: what to decode.
    output_dir: unused.
    earlier: unused.
    gammas: one timeline for each.
    example: which one, by number.

  Returns:
    For a record: per gamma what `profile` returns.
  """
  del output_dir, earlier
  return {
    'example': workload.prompts.examples[example].id,
    'lines': [profile(workload, example, gamma) for gamma in gammas],
  }


def profile(workload: Workload, example: int, gamma: int) -> dict[str, Any]:
  """Profiles the decoding of one example; 0 guesses is plain decoding.

  Returns:
    gamma, tokens, target_calls, seconds (of a run that was not profiled) and
    spans: [kind, begin, end], in seconds since the first operation, of a run
    that was. What lies between them is what no model does: the test of the
    guesses, the extra token, bookkeeping. A draft that is no network has no
    spans.
  """
  (batch,) = itertools.islice(workload.prompts.batches(1), example, example + 1)
  keys, (params, draft_params) = workload.keys(batch), workload.params
  config = workload.speculation(gamma)
  target, draft = _named(config.target, 'target'), config.draft
  if gamma == 0:
    arguments = params, batch.inputs, keys, batch.prompt
    program = autoregressive.decode.lower(
      target, config.sampling, config.limits, *arguments
    )
  else:
    if isinstance(draft, ModelDraft):
      draft = dataclasses.replace(draft, model=_named(draft.model, 'draft'))
    arguments = params, draft_params, batch.inputs, keys, batch.prompt
    program = speculative.decode.lower(
      dataclasses.replace(config, target=target, draft=draft), *arguments
    )
  compiled = _compiled(program)
  run = lambda: jax.block_until_ready(compiled(*arguments))
  run()
  began = time.perf_counter()
  result = run()
  seconds = time.perf_counter() - began
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
    found = list(spans(_events(path), scopes(compiled.as_text())))
  return {
    'gamma': gamma,
    'seconds': seconds,
    'tokens': int(result.length[0]),
    'target_calls': int(result.target_calls[0]),
    'spans': [[s.kind, round(s.begin, 7), round(s.end, 7)] for s in found],
  }


def _compiled(program: jax.stages.Lowered) -> jax.stages.Compiled:
  """Compiles; what a cache has of the same program lacks our names."""
  option = 'jax_compilation_cache_include_metadata_in_key'
  before = getattr(jax.config, option)
  jax.config.update(option, True)
  try:
    return program.compile()
  finally:
    jax.config.update(option, before)


def _named(model: LanguageModel, name: str) -> LanguageModel:
  """The same model; what it computes is named in the compiled program."""

  def within(scope, function):
    def named(*args):
      with jax.named_scope(scope):
        return function(*args)

    return named

  return dataclasses.replace(
    model,
    start=within(f'{name} encoder', model.start),
    extend=within(name, model.extend),
    logits=within(name, model.logits),
  )


def scopes(program: str) -> dict[str, Place]:
  """Instruction -> where it belongs, of HLO text.

  In a draft's own loop every instruction is the draft's: XLA leaves most of
  its products without a name. Elsewhere matrix products only: all else is
  short, and may run ahead of its call where it does not depend on the tokens.
  """
  named: dict[str, Place] = {}
  products: dict[str, Place] = {}
  computations: dict[str, list[str]] = {}
  inside: list[str] = []
  for line in program.splitlines():
    if line.endswith('{'):
      inside = computations.setdefault(line, [])
    instruction = re.match(r'\s+(?:ROOT )?%(\S+) = ', line)
    if instruction is None:
      continue
    inside.append(instruction[1])
    op_name = re.search(r'op_name="([^"]*)"', line)
    parts = op_name[1].split('/') if op_name else []
    kind = next((part for part in parts if part in KINDS), None)
    if kind is not None:
      # The draft's own loop stands inside the loop over blocks.
      place = kind, parts[: parts.index(kind)].count('while') > 1
      named[instruction[1]] = place
      if parts[-1] == 'dot_general':
        products[instruction[1]] = place
  found = products
  for names in computations.values():
    places = {named[name] for name in names if name in named}
    if places == {_OWN_LOOP}:
      found |= dict.fromkeys(names, _OWN_LOOP)
  return found


def _events(path: pathlib.Path) -> list[tuple[str, float, float]]:
  """(instruction, begin, end) in seconds, by time."""
  found = []
  for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
      for event in line.events:
        name = dict(event.stats).get('hlo_op')
        if name and not name.startswith(_CONTAINERS):
          begin = event.start_ns * 1e-9
          found.append((name, begin, begin + event.duration_ns * 1e-9))
  return sorted(found, key=lambda event: event[1])


def spans(
  events: list[tuple[str, float, float]], scopes: dict[str, Place]
) -> Iterator[Span]:
  """Joins the events of one call.

  A call begins where another kind, or the same instruction again, begins. It
  ends with its last matrix product, but a guess is drawn before the next call
  can begin: a draft's call lasts until then.
  """
  first = min((begin for _, begin, _ in events), default=0.0)
  current, place, seen = None, None, set()
  for name, begin, end in events:
    if name not in scopes:
      continue
    if scopes[name] != place or name in seen:
      if current is not None:
        if current.kind == 'draft':
          current.end = begin - first
        yield current
      place, seen = scopes[name], set()
      current = Span(place[0], begin - first, begin - first)
    seen.add(name)
    current.end = max(current.end, end - first)
  if current is not None:
    yield current
