# SPDX-License-Identifier: Apache-2.0
"""Decoder-only networks: cache, prompts, loops, sizes, training, jobs."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toy_models

from spec_decode import ModelDraft
from spec_decode import Sampling
from spec_decode import Speculation
from spec_decode import autoregressive
from spec_decode import generate
from spec_decode import row_keys
from spec_decode import speculative
from spec_decode import train
from spec_decode import workload
from spec_decode.autoregressive import Limits
from spec_decode.data import text
from spec_decode.data import training
from spec_decode.language_model import PARKED
from spec_decode.measure import acceptance_rate
from spec_decode.models import transformer
from spec_decode.models.decoder_only import DecoderOnlyConfig

GPT = DecoderOnlyConfig(
  vocab_size=50,
  emb_dim=16,
  num_heads=3,
  num_decoder_layers=2,
  head_dim=8,
  mlp_dim=24,
  mlp_activations=('gelu',),
  num_positions=150,
)
LAMDA = GPT.replace(mlp_activations=('gelu', 'linear'), num_positions=0)
TIED = GPT.replace(logits_via_embedding=True)
INPUTS = np.zeros((3, 1), np.int32)
# Three rows with prompts of one, two and four tokens, the first always id 0.
PROMPT = (
  np.array([[0, 0, 0, 0], [0, 7, 0, 0], [0, 9, 31, 4]], np.int32),
  np.array([1, 2, 4], np.int32),
)


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(config, params, tokens):
  """Logits after each of `tokens`, in one pass without a cache."""
  return transformer.network(config).apply(
    {'params': params}, jnp.asarray(INPUTS), tokens, enable_dropout=False
  )


@functools.partial(jax.jit, static_argnums=0)
def feed(model, params, cache, tokens, position):
  hidden, cache = model.extend(params, cache, tokens, position)
  return model.logits(params, hidden), cache


@pytest.mark.parametrize(
  'config, layout',
  [(GPT, 'checkpoint'), (TIED, 'fused'), (LAMDA, 'fused')],
  ids=['gpt', 'tied', 'lamda'],
)
def test_cached_chunks_equal_one_pass(config, layout):
  # Far enough for distances beyond 128, where the bias has one bucket.
  length = 150
  params = toy_models.t5_params(config, 0)
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 50, (3, length)).astype(np.int32)
  exact = np.asarray(teacher_forced(config, params, tokens))
  assert np.ptp(exact, axis=-1).min() > 1
  model = transformer.language_model(config, None, layout)
  params = model.prepare(params)
  cache = model.start(params, INPUTS, length)
  cache = toy_models.assert_chunks_equal_one_pass(
    feed, model, params, cache, tokens, exact
  )
  # An ended row writes nothing and makes nothing that is not finite.
  parked = np.array([PARKED, 3, PARKED])
  logits, after = feed(model, params, cache, tokens[:, 3:8], parked)
  assert np.isfinite(logits).all()
  heads = np.array([0, 1, 2, 6, 7, 8])
  for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after)):
    np.testing.assert_array_equal(old[heads], new[heads])


def test_absolute_positions_matter_and_the_future_does_not():
  tokens = np.full((3, 12), 7, np.int32)
  for config, varies in ((GPT, True), (LAMDA, False)):
    logits = np.asarray(
      teacher_forced(config, toy_models.t5_params(config, 0), tokens)
    )
    # One token over and over: only absolute positions tell its places apart.
    assert (np.ptp(logits[0], axis=0).max() > 0.1) == varies
    changed = tokens.copy()
    changed[:, 5] = 8
    other = np.asarray(
      teacher_forced(config, toy_models.t5_params(config, 0), changed)
    )
    np.testing.assert_array_equal(logits[:, :5], other[:, :5])
    assert (np.abs(logits[:, 5:] - other[:, 5:]).max(-1) > 1e-4).all()


def greedy_by_hand(config, params, prompt, count):
  """Argmax by one whole pass per token; no cache, no loop."""
  tokens = np.zeros((3, 48), np.int32)
  tokens[:, : len(prompt)] = prompt
  for end in range(len(prompt), len(prompt) + count):
    logits = np.array(teacher_forced(config, params, tokens)[0, end - 1])
    logits[0] = -np.inf
    tokens[:, end] = logits.argmax()
  return tokens[0, len(prompt) : len(prompt) + count].tolist()


def pair(config, sampling, gamma=3, eos_id=-1, noise=0.1):
  """A speculation with a draft that often agrees, and both parameters."""
  model = transformer.language_model(config)
  rng = np.random.default_rng(5)
  params = toy_models.t5_params(config, 0)
  draft_params = jax.tree.map(
    lambda x: x * (1 + noise * rng.standard_normal(x.shape, np.float32)), params
  )
  draft = ModelDraft(model, sampling, gamma)
  limits = Limits(36, eos_id)
  return Speculation(model, draft, sampling, limits), params, draft_params


def test_greedy_speculation_is_plain_decoding():
  config = GPT.replace(num_decoder_layers=1)
  speculation, params, draft_params = pair(config, Sampling(0.0))
  keys = row_keys(0, np.arange(3))
  fast = speculative.decode(
    speculation, params, draft_params, INPUTS, keys, PROMPT
  )
  plain = autoregressive.decode(
    speculation.target, speculation.sampling, speculation.limits, params,
    INPUTS, keys, PROMPT,
  )  # fmt: skip
  np.testing.assert_array_equal(fast.tokens, plain.tokens)
  assert fast.length.tolist() == [36] * 3
  for row in range(3):
    prompt = PROMPT[0][row, : PROMPT[1][row]]
    by_hand = greedy_by_hand(config, params, prompt, 36)
    assert fast.tokens[row].tolist() == by_hand
    assert len(set(by_hand)) > 3
  # Blocks of all kinds came up.
  histogram = fast.histogram.sum(0)
  assert histogram[0] > 0 and histogram[1:].sum() > 0


def test_a_sample_depends_on_its_row_alone():
  config = GPT.replace(num_decoder_layers=1)
  speculation, params, draft_params = pair(config, Sampling(1.0), eos_id=11)
  decode = functools.partial(
    speculative.decode, speculation, params, draft_params, INPUTS
  )
  together = decode(row_keys(0, np.array([4, 5, 6])), PROMPT)
  order = np.array([2, 0, 1])
  moved = decode(
    row_keys(0, np.array([6, 4, 5])), tuple(x[order] for x in PROMPT)
  )
  np.testing.assert_array_equal(together.tokens[order], moved.tokens)
  # Without prompts rows differ by their keys only, and they do.
  alike = np.zeros((3, 4), np.int32), np.ones(3, np.int32)
  free = decode(row_keys(0, np.array([4, 5, 4])), alike)
  assert free.tokens[0].tolist() == free.tokens[2].tolist()
  assert free.tokens[0].tolist() != free.tokens[1].tolist()


def test_alpha_is_of_the_tokens_after_each_prompt():
  speculation, params, draft_params = pair(LAMDA, Sampling(1.0, top_k=40))
  tokens = np.random.default_rng(2).integers(1, 50, (3, 6)).astype(np.int32)
  found = acceptance_rate.betas(
    speculation, (1.0,), params, draft_params, INPUTS, tokens, PROMPT
  )[0]
  top_40 = lambda z: np.where(z >= np.sort(z)[-40], z, -np.inf)
  for row in range(3):
    start = int(PROMPT[1][row])
    whole = np.zeros((3, 12), np.int32)
    whole[:, :start] = PROMPT[0][row, :start]
    whole[:, start : start + 6] = tokens[row]
    p, q = (
      np.asarray(teacher_forced(LAMDA, each, whole)[0], np.float64)
      for each in (params, draft_params)
    )
    for i in range(6):
      laws = []
      for logits in (p, q):
        z = logits[start - 1 + i].copy()
        z[0] = -np.inf  # padding
        e = np.exp(top_40(z))
        laws.append(e / e.sum())
      expected = np.minimum(*laws).sum()
      assert found[row, i] == pytest.approx(expected, abs=1e-4)
  assert np.ptp(found) > 0.05


def lm_network(name='tiny lm', checkpoint=None, **changes):
  sizes = dict(
    vocab_size=8064,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    num_decoder_layers=1,
    mlp_dim=32,
    mlp_activations=('gelu',),
    logits_via_embedding=True,
    num_positions=48,
  )
  config = DecoderOnlyConfig(**(sizes | changes))
  return workload.Network(name, config, checkpoint, vocab_size=8000)


def lm_workload(tmp_path, **changes):
  source = tiny.examples(tmp_path / 'examples.jsonl')
  prompts = text.Prompts(
    'tiny lm',
    functools.partial(
      text.plain, str(source), prefix='translate English to German: '
    ),
    input_length=3,
    truncate=True,
    continued='targets',
  )
  return tiny.make(
    tmp_path,
    target=lm_network(),
    draft=lm_network('tiny lm draft', emb_dim=8),
    prompts=prompts,
    **changes,
  )


def test_prompts_are_the_beginning_of_plain_text(tmp_path):
  prompts = lm_workload(tmp_path).prompts
  assert not prompts.problems()
  assert prompts.examples[0].targets == 'small tools '
  first, second = prompts.batches(2)
  assert first.inputs.tolist() == [[0], [0]] and second.count == 1
  (ids,) = prompts.tokenizer.encode(['small tools small tools'])
  tokens, lengths = first.prompt
  assert tokens[1].tolist() == [0, *ids[:3]] and lengths[1] == 4
  assert prompts.shown(1) == prompts.tokenizer.decode(ids[:3])
  free = dataclasses.replace(prompts, input_length=0)
  tokens, lengths = next(free.batches(3)).prompt
  assert tokens.tolist() == [[0]] * 3 and lengths.tolist() == [1] * 3
  whole = dataclasses.replace(prompts, truncate=False)
  assert 'at most 3 tokens' in whole.problems()[0]
  wrong = dataclasses.replace(prompts, continued='target')
  assert "'target'" in wrong.problems()[0]


def test_prompts_of_the_other_kind_are_refused(tmp_path):
  good = lm_workload(tmp_path)
  assert not good.problems()
  encoded = tiny.make(tmp_path)
  for target, prompts in (
    (good.target, encoded.prompts),
    (encoded.target, good.prompts),
  ):
    mixed = dataclasses.replace(
      good, target=target, draft=target, prompts=prompts
    )
    (problem,) = mixed.problems()
    assert 'text.Prompts.continued' in problem


def test_jobs_take_a_decoder_only_pair(tmp_path):
  job = lm_workload(tmp_path, temperature=0.0)
  rate = acceptance_rate.measure(job, str(tmp_path), num_tokens=8)
  assert 0 <= rate['alpha'] <= 1 and rate['tokens'] >= 8
  summary = generate.generate(job, str(tmp_path), num_samples=1)
  assert summary['examples'] == 3 and summary['differing_outputs'] == 0
  lines = (tmp_path / 'predictions.jsonl').read_text().splitlines()
  shown = [json.loads(line)['inputs'] for line in lines]
  assert shown == [job.prompts.shown(i) for i in range(3)]


def test_text_beyond_the_table_of_positions_is_refused():
  model = lm_network().model
  model.start({}, INPUTS, 48)
  with pytest.raises(ValueError, match='num_positions'):
    model.start({}, INPUTS, 49)


def test_training_on_plain_text_learns(tmp_path):
  source = tiny.examples(tmp_path / 'a.jsonl', 8)
  read = functools.partial(
    text.plain, str(source), prefix='translate English to German: '
  )
  batches = training.BucketedBatches(
    (training.Source(read),), text.Vocabulary(), ((1, 24),), tokens_per_batch=96
  )
  batch = next(batches.from_step(0))
  assert batch['inputs'].shape == (4, 1) and batch['targets'].shape == (4, 24)
  schedule = train.Schedule(0.02, warmup_steps=2, decay_steps=1, steps=12)
  train.train(
    str(tmp_path / 'out'), lm_network(), batches, schedule, log_every=2
  )
  curve = (tmp_path / 'out' / 'curve.jsonl').read_text().splitlines()
  first, last = (json.loads(curve[i])['loss'] for i in (0, -1))
  assert last < first - 1.0
  # What was written is read back, and learnt: likely text is more likely.
  trained = lm_network(checkpoint=str(tmp_path / 'out' / 'model.safetensors'))
  assert trained.problems(text.Vocabulary()) == []
  assert set(trained.load()['decoder']) >= {'positions', 'layers_0'}
