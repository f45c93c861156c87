# SPDX-License-Identifier: Apache-2.0
"""Traces say what the decode did, pages show it, timelines time its calls."""

import re

import jax
import numpy as np
import pytest
import tiny

from spec_decode.measure import timeline
from spec_decode.measure import trace

GAMMA = 3


@pytest.fixture(scope='module')
def workload(tmp_path_factory):
  return tiny.make(
    tmp_path_factory.mktemp('trace'),
    temperature=1.0,
    gamma=GAMMA,
    max_new_tokens=12,
    batch_size=1,
  )


@pytest.fixture(scope='module')
def profiled():
  """The events of the profile that `found` makes."""
  return []


@pytest.fixture(scope='module')
def found(workload, profiled, tmp_path_factory):
  folder = tmp_path_factory.mktemp('page')
  spans = timeline.spans

  def noting(events, scopes):
    profiled.extend(events)
    return spans(events, scopes)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(timeline, 'spans', noting)
    result = trace.measure(workload, str(folder), example=1)
  return result, (folder / 'trace.html').read_text(encoding='utf-8')


def test_blocks_are_those_of_the_decode(workload, found):
  batch = list(workload.batches())[1]
  result = jax.device_get(
    workload.decode(batch, workload.speculation(measure_beta=True))
  )
  blocks = found[0]['blocks']
  assert len(blocks) == result.target_calls[0]
  kept = [t['id'] for b in blocks for t in b if t['what'] in
          ('accepted', 'correction', 'bonus')]  # fmt: skip
  assert kept == result.tokens[0, : result.length[0]].tolist()
  tested = [
    t for b in blocks for t in b if t['what'] in ('accepted', 'rejected')
  ]
  assert len(tested) == result.tested[0]
  total = sum(token['beta'] for token in tested)
  assert total == pytest.approx(result.beta_tested[0], abs=1e-4)
  for block in blocks:
    *guesses, last = block
    assert all(0 <= token['p'] <= 1 for token in block)
    if last['what'] == 'correction':
      (rejected,) = [t for t in guesses if t['what'] == 'rejected']
      assert last['beta'] == rejected['beta']
      # Drawn from norm(max(0, p - q)).
      assert 0 <= last['q'] < last['p']
    elif last['what'] == 'bonus':
      assert 'q' not in last and 'beta' not in last
    else:
      guesses.append(last)
    assert all(0 < token['q'] <= 1 for token in guesses)


def test_the_page_shows_every_token_and_call(found):
  result, page = found
  tokens = [token for block in result['blocks'] for token in block]
  kept = sum(t['what'] in ('accepted', 'correction', 'bonus') for t in tokens)
  # A line per call has them all, the text those that stayed.
  assert page.count('tabindex="0" data-call=') == len(tokens) + kept
  assert len(re.findall('title="“.*?; p = .*?; call ', page)) == (
    len(tokens) + kept
  )
  assert page.count('<tr data-call') == len(result['blocks'])
  assert not re.search(r'(src|href)=', page)  # self-contained


def test_text_is_escaped(found):
  from spec_decode.report import trace_page

  evil = '<script>alert("&")</script>'
  changed = found[0] | {'inputs': evil, 'example': evil, 'draft': evil}
  token = {'id': 5, 'text': evil, 'what': 'bonus', 'p': 0.5}
  page = trace_page.page(changed | {'blocks': [[token]]})
  assert page.count('<script>') == 1  # its own
  assert '&lt;script&gt;alert(&quot;&amp;&quot;)' in page


def test_every_call_has_a_span(found):
  profile = found[0]['profile']
  kinds = [kind for kind, _, _ in profile['spans']]
  assert kinds.count('target') == profile['target_calls']
  assert kinds.count('draft') == GAMMA * profile['target_calls']
  assert 'target encoder' in kinds and 'draft encoder' in kinds
  begins = [begin for _, begin, _ in profile['spans']]
  assert begins == sorted(begins) and begins[0] >= 0
  assert all(begin < end for _, begin, end in profile['spans'])


def test_calls_cover_their_blocks(found, profiled):
  """No product is outside, whatever XLA called it, and little between."""
  spans = found[0]['profile']['spans']
  first = profiled[0][1]
  products = [event for event in profiled if event[0].startswith('dot')]
  assert len(products) > len(spans)
  for name, begin, end in products:
    assert any(
      low - 1e-6 < begin - first and end - first < high + 1e-6
      for _, low, high in spans
    ), name
  calls = [span for span in spans if 'encoder' not in span[0]]
  for i in range(0, len(calls), GAMMA + 1):
    block = calls[i : i + GAMMA + 1]
    assert [kind for kind, *_ in block] == ['draft'] * GAMMA + ['target']
    covered = sum(end - begin for _, begin, end in block)
    assert covered > 0.8 * (block[-1][2] - block[0][1])


def test_all_of_a_drafts_own_loop_is_the_drafts():
  named = 'metadata={op_name="jit(decode)/while/body'
  program = f"""
%body (p: f32[]) -> f32[] {{
  %dot.1 = f32[] dot(%p, %p), {named}/draft/x/dot_general"}}
  %dot.2 = f32[] dot(%p, %p)
  %add.1 = f32[] add(%p, %p), {named}/target/x/add"}}
  ROOT %dot.3 = f32[] dot(%p, %p), {named}/target/x/dot_general"}}
}}

%own (p: f32[]) -> f32[] {{
  %add.2 = f32[] add(%p, %p), {named}/while/body/draft/x/add"}}
  ROOT %dot.4 = f32[] dot(%p, %p)
}}
"""
  assert timeline.scopes(program) == {
    'dot.1': ('draft', False),
    'dot.3': ('target', False),
    'add.2': ('draft', True),
    'dot.4': ('draft', True),
  }


def test_a_repeated_instruction_begins_a_new_span():
  scopes = {'a': ('draft', False), 'b': ('draft', True), 'c': ('target', False)}
  names = ['a', 'b', 'x', 'b', 'c', 'a']
  events = [(name, i, i + 0.5) for i, name in enumerate(names)]
  found = list(timeline.spans(events, scopes))
  assert [s.kind for s in found] == [
    'draft', 'draft', 'draft', 'target', 'draft',
  ]  # fmt: skip
  np.testing.assert_allclose([s.begin for s in found], [0, 1, 3, 4, 5])
  # A draft's call lasts until the next begins.
  np.testing.assert_allclose([s.end for s in found], [1, 3, 4, 4.5, 5.5])
