# SPDX-License-Identifier: Apache-2.0
"""Drafts that guess only among the most frequent ids."""

import dataclasses
import itertools
import json

import chi_squared
import jax
import numpy as np
import pytest
import tiny
import toy_models

from spec_decode import autoregressive
from spec_decode import draft_sources
from spec_decode import speculative
from spec_decode.autoregressive import Limits
from spec_decode.drafts import ModelDraft
from spec_decode.models import decoder_only
from spec_decode.models import ngram
from spec_decode.models import transformer
from spec_decode.randomness import row_keys
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation

T5 = toy_models.TINY_T5
CONFIGS = {
  '1.0': toy_models.TINY_TIED_T5,
  '1.1': T5,
  'decoder only': decoder_only.DecoderOnlyConfig(
    50, emb_dim=16, num_heads=2, head_dim=8, num_decoder_layers=1, mlp_dim=32
  ),
}


@pytest.mark.parametrize('layout', ['checkpoint', 'fused'])
@pytest.mark.parametrize('kind', CONFIGS)
def test_only_ids_of_the_list_have_logits(kind, layout):
  config, ids = CONFIGS[kind], (1, 4, 5, 30, 49)
  params = toy_models.t5_params(config, 0)
  hidden = np.random.default_rng(1).normal(size=(3, 2, 16)).astype(np.float32)
  logits = {}
  for shortlist in ((), ids):
    model = transformer.language_model(config, None, layout, shortlist)
    prepared = model.prepare(params)
    logits[shortlist] = np.asarray(jax.jit(model.logits)(prepared, hidden))
  assert prepared['decoder']['logits_dense']['kernel'].shape == (16, len(ids))
  assert 'shortlist' not in params['decoder']
  whole, some = logits[()], logits[ids]
  assert whole.shape == some.shape == (3, 2, 50)
  np.testing.assert_allclose(some[..., ids], whole[..., ids], atol=1e-5)
  others = np.setdiff1d(np.arange(50), ids)
  assert (some[..., others] == -np.inf).all()


def decode(config, ids, temperature, limits, params, inputs):
  """Speculation, with a draft near the target, and plain decoding."""
  target = transformer.language_model(config)
  draft = transformer.language_model(config, shortlist=ids)
  draft_params = draft.prepare(toy_models.perturbed(params, 1, 0.1))
  sampling, keys = Sampling(temperature), row_keys(5, np.arange(len(inputs)))
  both = Speculation(target, ModelDraft(draft, sampling, 2), sampling, limits)
  result = speculative.decode(both, params, draft_params, inputs, keys)
  assert (np.asarray(result.histogram).sum(0) > 0).all()
  tokens = np.asarray(result.tokens)
  assert not set(np.unique(tokens)) <= {0, *ids}
  plain = autoregressive.decode(target, sampling, limits, params, inputs, keys)
  return tokens, np.asarray(plain.tokens)


def test_greedy_outputs_are_those_of_plain_decoding():
  params = toy_models.t5_params(T5, 4)
  inputs = np.random.default_rng(0).integers(1, 50, (5, 9)).astype(np.int32)
  ids = tuple(range(1, 50, 2))
  found, want = decode(T5, ids, 0.0, Limits(64, -1), params, inputs)
  np.testing.assert_array_equal(found, want)


def test_samples_follow_the_law_of_the_target():
  """Two tokens from three inputs; half of the ids are never guessed."""
  size, samples = 8, 60_000
  config = T5.replace(vocab_size=size, num_decoder_layers=1)
  params = toy_models.t5_params(config, 3)
  starts = np.array([[3, 1, 0], [5, 6, 1], [7, 2, 4]], np.int32)
  rows = np.arange(samples) % len(starts)
  tokens, _ = decode(
    config, (1, 2, 5, 7), 1.0, Limits(2, -1), params, starts[rows]
  )
  p = probabilities(config, params, starts)
  law = {
    (i, a, b): p[i, a, 0, a] * p[i, a, 1, b] / len(starts)
    for i, a, b in itertools.product(range(3), range(1, size), range(1, size))
  }
  chi_squared.assert_follows(list(zip(rows.tolist(), *tokens.T.tolist())), law)


def probabilities(config, params, starts):
  """p [start, first, place, id] of the target, without padding."""
  size, number = config.vocab_size, len(starts)
  first = np.tile(np.arange(size), number)
  logits = transformer.network(config).apply(
    {'params': params},
    np.repeat(starts, size, axis=0),
    np.stack([0 * first, first], axis=1),
    enable_dropout=False,
  )
  logits = np.array(logits, np.float64).reshape(number, size, 2, size)
  logits[..., 0] = -np.inf
  p = np.exp(logits - logits.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


def test_the_most_frequent_ids_of_what_a_model_wrote(tmp_path):
  rows = [[7, 7, 7, 1], [5, 5, 9, 1], [9, 3, 1]]
  lines = [json.dumps({'inputs': 'x', 'tokens': row}) for row in rows]
  (tmp_path / 'written.jsonl').write_text('\n'.join(lines))
  summary = draft_sources.count(
    str(tmp_path), str(tmp_path / 'written.jsonl'), order=1, targets='tokens'
  )
  assert summary == {'texts': 3, 'tokens': 11}
  tables = ngram.load(tmp_path / 'ngrams.safetensors')
  # 1 and 7 three times, 5 and 9 twice: of equals the lowest.
  assert ngram.most_frequent(tables, 2) == (1, 7)
  assert ngram.most_frequent(tables, 3) == (1, 5, 7)
  assert ngram.most_frequent(tables, 4) == (1, 5, 7, 9)


@pytest.fixture
def counted(tmp_path):
  path = tmp_path / 'counted.safetensors'
  counts = ngram.count([list(range(8000)), [1, 1, 5]], 8000, 1)
  ngram.save(path, counts, {})
  return str(path)


def test_a_workload_decodes_with_one_and_keeps_its_output(tmp_path, counted):
  workload = tiny.make(tmp_path, temperature=0.0)
  draft = dataclasses.replace(workload.draft, shortlist=2, frequencies=counted)
  short = dataclasses.replace(workload, draft=draft)
  assert short.problems() == []
  batch = next(workload.batches())
  want, got = workload.decode_plain(batch), short.decode(batch)
  np.testing.assert_array_equal(got.tokens, want.tokens)
  assert short.params[1]['decoder']['shortlist'].tolist() == [1, 5]


@pytest.mark.parametrize(
  'role, changes, message',
  [
    ('draft', {'frequencies': None}, 'Expected frequencies with the shortlist'),
    ('draft', {'shortlist': -1}, 'Expected shortlist >= 0, got -1'),
    ('draft', {'shortlist': 8001}, 'at most the 8000 ids of'),
    ('draft', {'frequencies': 'none.safetensors'}, 'found no file'),
    ('target', {}, 'Expected shortlist = 0 of tiny as the target'),
  ],
)
def test_one_that_cannot_work_is_refused(
  tmp_path, counted, role, changes, message
):
  workload = tiny.make(tmp_path)
  changed = dataclasses.replace(
    getattr(workload, role),
    **{'shortlist': 3, 'frequencies': counted} | changes,
  )
  (problem,) = dataclasses.replace(workload, **{role: changed}).problems()
  assert message in problem


def test_one_of_another_vocabulary_is_refused(tmp_path):
  path = tmp_path / 'other.safetensors'
  ngram.save(path, ngram.count([[1, 2]], 8000, 1), {'vocabulary': 'another'})
  workload = tiny.make(tmp_path)
  draft = dataclasses.replace(
    workload.draft, shortlist=3, frequencies=str(path)
  )
  (problem,) = dataclasses.replace(workload, draft=draft).problems()
  assert 'was counted with (sha256 another...)' in problem
