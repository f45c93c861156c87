# SPDX-License-Identifier: Apache-2.0
"""alpha, its error, costs and quality, on models small enough to check."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import toy_models as toy

from spec_decode import Limits
from spec_decode import ModelDraft
from spec_decode import Sampling
from spec_decode import Speculation
from spec_decode import autoregressive
from spec_decode import row_keys
from spec_decode import theory
from spec_decode.measure import acceptance_rate
from spec_decode.measure import benchmark
from spec_decode.measure import costs
from spec_decode.measure import quality
from spec_decode.measure import walltime

SIZE = 5


def _tables():
  params = toy.table_params(3, SIZE)
  return params, toy.nearby(params, 4)


def _config(sampling, gamma=2, draft_sampling=None):
  model = toy.table_model(SIZE)
  draft = ModelDraft(model, draft_sampling or sampling, gamma)
  return Speculation(model, draft, sampling, Limits(6, eos_id=1))


@pytest.mark.parametrize(
  'sampling, draft_sampling',
  [
    (Sampling(), Sampling()),
    (Sampling(0.7, top_k=3), Sampling(1.3)),
    (Sampling(0.0), Sampling(0.0)),
    (Sampling(0.0), Sampling(1.0)),
  ],
)
def test_betas_equal_theory_at_every_prefix(sampling, draft_sampling):
  params, draft_params = _tables()
  inputs = jnp.arange(4)[:, None]
  plain = autoregressive.decode(
    toy.table_model(SIZE), Sampling(), Limits(6), params, inputs,
    row_keys(0, jnp.arange(4)),
  )  # fmt: skip
  config = _config(sampling, draft_sampling=draft_sampling)
  found = acceptance_rate.betas(
    config, (1.0,), params, draft_params, inputs, plain.tokens
  )[0]
  for row in range(4):
    for i in range(int(plain.length[row])):
      prefix = (0, *plain.tokens[row, :i].tolist())
      p, q = (
        toy.probabilities(
          table,
          prefix,
          row,
          lambda z, s=s: reference.standardize(z, s.temperature, s.top_k),
        )
        for table, s in ((params, sampling), (draft_params, draft_sampling))
      )
      assert found[row, i] == pytest.approx(np.minimum(p, q).sum(), abs=1e-5)


def test_lenience_raises_alpha_as_its_formula_says():
  params, draft_params = _tables()
  inputs = jnp.arange(3)[:, None]
  tokens = jnp.array([[2, 3, 4], [3, 3, 1], [4, 2, 2]])
  config = _config(Sampling())
  levels = (1.0, 0.5, 0.1)
  found = acceptance_rate.betas(
    config, levels, params, draft_params, inputs, tokens
  )
  for row in range(3):
    p, q = (
      toy.probabilities(
        table, (0, *tokens[row, :2].tolist()), row, reference.standardize
      )
      for table in (params, draft_params)
    )
    for i, level in enumerate(levels):
      expected = np.minimum(p / level, q).sum()
      assert found[i, row, 2] == pytest.approx(expected, abs=1e-5)


def test_one_guess_at_a_time_equals_one_pass():
  """Drafts that are not models are asked step by step: the same q."""

  @dataclasses.dataclass(frozen=True)
  class Wrapped:
    inner: ModelDraft
    gamma: int

    def start(self, *args):
      return self.inner.start(*args)

    def propose(self, *args):
      return dataclasses.replace(self.inner, gamma=1).propose(*args)

  _, draft_params = _tables()
  draft = ModelDraft(toy.table_model(SIZE), Sampling(), 3)
  inputs = jnp.arange(3)[:, None]
  tokens = jnp.array([[2, 3, 4], [3, 3, 1], [4, 2, 2]])
  parallel, stepped = (
    acceptance_rate.draft_distributions(d, draft_params, inputs, tokens, SIZE)
    for d in (draft, Wrapped(draft, 3))
  )
  np.testing.assert_allclose(parallel, stepped, atol=1e-6)


def test_standard_error_matches_its_spread_over_resamples():
  """Clusters: the error of a ratio is its spread over fresh examples."""
  rng = np.random.default_rng(0)

  def sample():
    level = rng.beta(4, 2, size=50)
    wholes = rng.integers(3, 30, size=50)
    return rng.binomial(wholes, level), wholes

  ratios = [acceptance_rate.Ratio.of(*sample()) for _ in range(400)]
  spread = np.std([r.value for r in ratios])
  # The mean of 400 estimates against a spread that is known to 1/sqrt(800).
  assert np.mean([r.error for r in ratios]) == pytest.approx(spread, rel=0.15)


def test_alpha_of_two_drafts_on_one_text(tmp_path, monkeypatch):
  workload = tiny.make(tmp_path, temperature=1.0)
  same = dataclasses.replace(workload, draft=workload.target)
  found = acceptance_rate.measure(same, str(tmp_path), num_tokens=8)
  assert found['alpha'] == pytest.approx(1.0, abs=1e-5)
  assert found['tokens'] >= 8
  # Another draft finds the text and the target's pass over it done.
  with monkeypatch.context() as patch:
    patch.delattr(type(workload), 'decode_plain')
    patch.delattr(acceptance_rate, '_hidden')
    other = acceptance_rate.measure(workload, str(tmp_path), num_tokens=8)
  betas = []
  for written in acceptance_rate.target_texts(workload, 2, 8):
    found = acceptance_rate.betas(
      workload.speculation(), (1.0,), *workload.params, written.batch.inputs,
      written.tokens,
    )[0]  # fmt: skip
    betas += [
      value
      for row, length in zip(
        np.asarray(found)[: written.batch.count], written.length
      )
      for value in row[:length]
    ]
  assert other['alpha'] == pytest.approx(np.mean(betas), rel=1e-5)


def test_what_a_speculative_run_accepts_stands_beside_alpha(tmp_path):
  workload = tiny.make(tmp_path, number=5, temperature=1.0, gamma=3)
  same = dataclasses.replace(workload, draft=workload.target)
  found = acceptance_rate.measure(same, '', num_tokens=8, num_decoded=3)
  sure = found['decoded']
  # Two batches of two; every guess of the target itself is accepted.
  assert sure['examples'] == 4 and sure['gamma'] == 3
  assert sure['beta_tested'] == pytest.approx(1.0, abs=1e-5)
  assert sure['accepted_per_tested'] == 1.0
  assert sure['tokens_per_call'] > 2
  found = acceptance_rate.measure(workload, '', num_tokens=8, num_decoded=9)
  real = found['decoded']
  assert real['examples'] == 5
  assert 0 < real['beta_tested'] < 1
  total = dict.fromkeys(('length', 'target_calls', 'accepted', 'drawn'), 0)
  for batch in workload.batches():
    result = workload.decode(batch)
    for name in total:  # the last batch has one row to fill it
      total[name] += int(getattr(result, name)[: batch.count].sum())
  assert real['tokens_per_call'] == total['length'] / total['target_calls']
  assert real['accepted_per_drawn'] == total['accepted'] / total['drawn']


def test_costs_are_measured_after_prompts_of_unlike_length():
  params, draft_params = _tables()
  config = _config(Sampling(), gamma=3)
  inputs = jnp.arange(3)[:, None]
  prompt = jnp.full((3, 4), 2), jnp.array([1, 2, 4])
  found = costs.costs(
    config, params, draft_params, inputs, repeats=3, calls=50, prefix=4,
    prompt=prompt,
  )  # fmt: skip
  assert found.plain_step > 0 and found.wide[3] > 0


@pytest.mark.parametrize(
  'together, in_loop', [((1.1, 1.3, 1.0), 0.3), ((0.7, 0.7, 0.6), 0.0)]
)
def test_a_guess_costs_what_it_adds_to_the_target_call(
  monkeypatch, together, in_loop
):
  seconds = dict(
    plain_step=(0.5,) * 3, target=(0.8, 1.0, 0.6), draft=(0.2,) * 3,
    draft_and_target=together, iteration=(1.2,) * 3,
  ) | {1: (0.7,) * 3}  # fmt: skip

  def rounds(functions, repeats):
    assert repeats == 3
    return {name: 7 * np.array(seconds[name]) for name in functions}

  monkeypatch.setattr(costs, 'rounds', rounds)
  monkeypatch.setattr(
    costs,
    'thunks',
    lambda config, parts, gammas, **_: dict.fromkeys([*parts, *gammas]),
  )
  found = costs.costs(
    _config(Sampling(), gamma=3), gammas=(1, 3), repeats=3, calls=7
  )
  # Target and draft are compared within each round: 0.3, 0.3, 0.4.
  spread = np.std(np.subtract(together, seconds['target']), ddof=1)
  assert found.draft_in_loop == pytest.approx(in_loop)
  assert found.c == pytest.approx(in_loop / 3 / 0.5)
  assert found.c_error == pytest.approx(spread / np.sqrt(3) / 3 / 0.5)
  assert found.c_alone == pytest.approx(0.2 / 3 / 0.5)
  assert found.wide_ratios == {1: pytest.approx(1.4), 3: pytest.approx(1.6)}
  assert found.overhead == pytest.approx(1.2 / np.median(together))


@pytest.mark.parametrize('part', ['plain_step', 'draft', 'iteration'])
def test_timed_loops_do_one_call_per_round(part):
  """A loop of n rounds makes n calls, however soon its rows would end."""
  params, draft_params = _tables()
  config = _config(Sampling(), gamma=2)
  config = dataclasses.replace(config, limits=Limits(30, eos_id=-1))
  from spec_decode import speculative

  inputs = jnp.arange(3)[:, None]
  caches = speculative.start(config, params, draft_params, inputs)
  state = speculative.init(config, params, caches, row_keys(0, jnp.arange(3)))
  tokens, calls = costs.loop(config, part, 17, params, draft_params, state)
  assert calls.tolist() == [17] * 3
  assert jnp.any(tokens != 0)


def test_walltime_record_has_both_predictions(tmp_path):
  workload = tiny.make(tmp_path, temperature=0.0)
  found = walltime.measure(
    workload,
    str(tmp_path),
    {'acceptance_rate': {'alpha': 0.5}},
    num_batches=1,
    repeats=1,
  )
  assert found['predicted_theorem_3_8'] == pytest.approx(
    theory.speedup(0.5, 2, found['c'])
  )
  assert found['differing_outputs'] == 0
  assert found['tokens_per_call'] >= 1
  assert found['plain_tokens'] == found['tokens'] > 0
  # Single timings of a tiny network can be all noise, their arithmetic not.
  plain, fast = found['plain_seconds'], found['fast_seconds']
  assert found['speedup'] == pytest.approx(plain / fast)
  plain += found['start_plain_seconds']
  fast += found['start_seconds']
  assert found['speedup_with_encoder'] == pytest.approx(plain / fast)


def test_speedup_is_per_token_where_texts_differ_in_length():
  fast_tokens = np.array([10, 30, 20])
  plain_tokens = np.array([40, 5, 15])
  value, _ = walltime.speedup(
    3 * plain_tokens, plain_tokens, 2 * fast_tokens, fast_tokens
  )
  assert value == pytest.approx(1.5)
  _, unknown = walltime.speedup([3], [1], [2], [1])
  assert np.isnan(unknown)


def test_error_of_the_speedup_matches_its_spread_over_resamples():
  rng = np.random.default_rng(1)

  def sample():
    tokens = rng.integers(5, 30, size=(2, 40))
    plain, fast = tokens * rng.uniform([[2.0], [1.0]], [[4.0], [3.0]], (2, 40))
    return plain, tokens[0], fast, tokens[1]

  found = np.array([walltime.speedup(*sample()) for _ in range(400)])
  # Of a spread from 400 samples one standard error is 3.5 %.
  np.testing.assert_allclose(
    found[:, 1].mean(), found[:, 0].std(ddof=1), rtol=0.15
  )


def test_hopeless_speculation_is_said_plainly(tmp_path, monkeypatch):
  workload = tiny.make(tmp_path, temperature=0.0)
  # Real seconds of a tiny network are noise.
  wide = {workload.gamma: 20.0, 3: 20.0}
  dear = costs.Costs(1.0, wide, 1.0, 0.1, 1.0, 21.0, 21.0, workload.gamma)
  monkeypatch.setattr(costs, 'costs', lambda *args, **kwargs: dear)
  seconds = dict(plain=6.0, fast=12.0, start=0.5, start_plain=0.5)
  monkeypatch.setattr(costs, 'medians', lambda functions, repeats: seconds)
  with pytest.warns(UserWarning, match='does not pay here, measured 0.50x'):
    walltime.measure(
      workload,
      str(tmp_path),
      {'acceptance_rate': {'alpha': 0.0}},
      num_batches=1,
      repeats=1,
    )


@pytest.mark.parametrize(
  'best, advice',
  [
    (0, 'Expected are gamma 1 1.30x, gamma 3 0.50x: only a closer'),
    (1, 'Gamma 1 should give 1.30x.'),
    # It should have paid, and did not.
    (3, 'only a closer'),
  ],
)
def test_the_reason_says_whether_any_gamma_would_pay(best, advice):
  summary = {
    'gamma': 3,
    'tokens_per_call': 1.2,
    'predicted_from_costs': 0.5,
    'speedup': 0.61,
    'wide_ratio': 1.5,
    'expected_by_gamma': {'1': 1.3, '3': 0.5},
    'best_gamma_here': best,
  }
  said = walltime.reason(summary)
  assert advice in said
  assert 'measured 0.61x' in said
  assert 'yields 1.20 tokens and costs 2.40 plain steps' in said


def test_the_best_gamma_is_expected_to_yield_what_was_seen_at_its_own():
  cost = costs.Costs(1.0, {1: 1.1, 3: 1.2, 7: 2.0}, 0.3, 0.0, 0.3, 1.5, 1.5, 3)
  found = walltime._best_gamma(cost, 2.4)
  assert found['expected_by_gamma']['3'] == pytest.approx(2.4 / 1.5)
  assert found['best_gamma_here'] == 3
  assert walltime._best_gamma(cost, 1.05)['best_gamma_here'] == 0
  assert walltime._best_gamma(cost, 3.9)['best_gamma_here'] == 7


def test_step_bytes_leaves_out_what_a_step_does_not_read():
  network = tiny.network(layers=2)
  params = network.load()
  wanted = sum(leaf.nbytes for leaf in jax.tree.leaves(params['decoder']))
  cross = 2 * 2 * 16 * 16 * 4  # layers, key and value, E x H D, float32
  assert benchmark.step_bytes(params) == wanted - cross
  tied = tiny.network(logits_via_embedding=True).load()
  assert benchmark.step_bytes(tied) > 8064 * 16 * 4


def test_quality_of_perfect_and_unrelated_text():
  texts = ['the cat sat on the mat today', 'a second sentence of some length']
  for metric in ('bleu', 'rouge_l'):
    (perfect,) = quality.measure(metric, texts, texts).values()
    (bad,) = quality.measure(metric, ['x y z w', 'u v'], texts).values()
    assert perfect == pytest.approx(100, abs=1e-3) and bad < 1


def test_benchmark_ratios_are_of_timings_that_took_turns(monkeypatch):
  seconds = {
    'plain_step': 0.2, 'target': 0.3, 'draft': 0.1, 'draft_and_target': 0.4,
    'iteration': 0.5, 'plain': 0.4, 'long': 0.6, 'read': 0.1, 2: 0.8,
  }  # fmt: skip
  asked = []

  def rounds(functions, repeats):
    asked.append(list(functions))
    return {name: np.full(repeats, seconds[name]) for name in functions}

  monkeypatch.setattr(costs, 'rounds', rounds)
  found = benchmark.measure(
    '', tiny.network(), tiny.network('draft'), gamma=2, widths=(2,),
    batch_sizes=(1, 2), capacities=(20, 24), input_length=4,
  )  # fmt: skip
  assert asked[2:] == [['plain', 'long', 'read', 2]]
  assert found['wide_over_one'] == {2: pytest.approx(2.0)}
  assert found['capacity_ratio'] == pytest.approx(1.5)
  assert found['bandwidth_gb_s'] == pytest.approx(2**28 / 0.1 / 1e9)
  # 20 calls in 0.4 s read so many bytes; memory gives 2**28 in 0.1 s.
  read = found['step_megabytes'] * 1e6 * 20 / 0.4
  assert found['bandwidth_used'] == pytest.approx(read / (2**28 / 0.1))
  assert [row['batch_size'] for row in found['rows']] == [1, 2]
  assert found['rows'][0]['overhead'] == pytest.approx(0.5 / 0.4)
  assert found['rows'][0]['draft_in_loop_ms'] == pytest.approx(1e3 * 0.1 / 20)
