# SPDX-License-Identifier: Apache-2.0
"""The network against Hugging Face's T5: same weights, logits and greedy ids.

Needs torch and transformers, which `pip install .[parity]` brings.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from spec_decode.models import checkpoints
from spec_decode.models import hugging_face
from spec_decode.models import transformer

VOCABULARY = 97
# The longest row is longer than the 128 up to which distances are told apart.
INPUT_LENGTHS = (150, 37, 9)
TARGET_LENGTH = 20
VERSIONS = {
  '1.0': {'feed_forward_proj': 'relu', 'tie_word_embeddings': True},
  '1.1': {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
}


def random_model(version):
  """A T5ForConditionalGeneration whose every weight is random."""
  torch.manual_seed(7)
  config = transformers.T5Config(
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=8,
    d_ff=48,
    # Its generate() makes room for `num_layers` decoder layers, not for more.
    num_layers=3,
    num_decoder_layers=2,
    num_heads=3,
    decoder_start_token_id=0,
    **VERSIONS[version],
  )
  model = transformers.T5ForConditionalGeneration(config).eval()
  if version == '1.1':
    # transformers ties the two matrices whatever the config says.
    untied = torch.randn(VOCABULARY, config.d_model) * config.d_model**-0.5
    model.lm_head.weight = torch.nn.Parameter(untied)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      if 'layer_norm' in name:  # else all ones
        weight.uniform_(0.5, 1.5)
      if name.endswith(('.o.weight', '.wo.weight')):
        weight *= 20  # else the tied model repeats its input
  # Rows that stopped early would compare padding.
  model.generation_config.eos_token_id = None
  return model


@pytest.fixture(scope='module', params=VERSIONS)
def pair(request, tmp_path_factory):
  """(Hugging Face model, our network, its parameters, the directory)."""
  path = tmp_path_factory.mktemp(request.param)
  model = random_model(request.param)
  model.save_pretrained(path)
  config = hugging_face.config(path)
  params = checkpoints.load(path, config)
  return model, transformer.Transformer(config), params, path


@pytest.fixture(scope='module')
def batch():
  """Inputs [3, 150], padded with 0, and decoder inputs [3, 20]."""
  rng = np.random.default_rng(11)
  inputs = rng.integers(2, VOCABULARY, (3, max(INPUT_LENGTHS)))
  for row, length in zip(inputs, INPUT_LENGTHS, strict=True):
    row[length:] = 0
  targets = rng.integers(1, VOCABULARY, (3, TARGET_LENGTH))
  targets[:, 0] = 0
  return inputs, targets


def torch_inputs(inputs):
  return {
    'input_ids': torch.tensor(inputs),
    'attention_mask': torch.tensor(inputs > 0).long(),
  }


def greedy(network, params, inputs, length):
  """Greedy ids [batch, length], one token a call, in a plain loop."""
  variables = {'params': params}
  cache = network.apply(
    variables, jnp.asarray(inputs), length + 1, method='start'
  )

  @jax.jit
  def step(cache, tokens, position):
    hidden, cache = network.apply(
      variables, cache, tokens, position, method='extend'
    )
    logits = network.apply(variables, hidden, method='logits')
    return jnp.argmax(logits, axis=-1), cache

  tokens = jnp.zeros((len(inputs), 1), jnp.int32)
  ids = []
  for i in range(length):
    tokens, cache = step(cache, tokens, jnp.full(len(inputs), i))
    ids.append(tokens)
  return np.concatenate(ids, axis=1)


def test_config_of_each_version(pair):
  model, network, _, path = pair
  config = network.config
  assert config.logits_via_embedding == model.config.scale_decoder_outputs
  raw = json.loads((path / 'config.json').read_text())
  sizes = (raw['d_model'], raw['num_heads'], raw['d_kv'], raw['d_ff'])
  assert sizes == (
    config.emb_dim,
    config.num_heads,
    config.head_dim,
    config.mlp_dim,
  )


def test_teacher_forced_logits(pair, batch):
  model, network, params, _ = pair
  inputs, targets = batch
  with torch.no_grad():
    want = model(
      **torch_inputs(inputs), decoder_input_ids=torch.tensor(targets)
    ).logits.numpy()
  apply = jax.jit(functools.partial(network.apply, enable_dropout=False))
  got = apply({'params': params}, inputs, targets)
  # Far from constant, so the bound means something.
  assert want.std(axis=-1).min() > 0.1
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
  print('largest difference', np.abs(got - want).max())


def test_greedy_ids(pair, batch):
  model, network, params, _ = pair
  inputs, _ = batch
  want = model.generate(
    **torch_inputs(inputs), do_sample=False, max_new_tokens=TARGET_LENGTH
  ).numpy()
  assert want.shape == (3, 1 + TARGET_LENGTH)
  # Rows that differ and do not repeat one id for ever.
  assert len({tuple(row) for row in want}) == 3
  assert len(np.unique(want)) > 5
  got = greedy(network, params, inputs, TARGET_LENGTH)
  np.testing.assert_array_equal(got, want[:, 1:])


def test_sharded_save_equals_one_file(pair, tmp_path):
  model, network, params, _ = pair
  model.save_pretrained(tmp_path, max_shard_size='20KB')
  assert len(list(tmp_path.glob('*.safetensors'))) > 1
  got = checkpoints.load(tmp_path, network.config)
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_tied_save_of_untied_model_is_refused(tmp_path):
  config = random_model('1.1').config
  transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
  with pytest.raises(ValueError, match='saved with tied embeddings'):
    checkpoints.load(tmp_path, hugging_face.config(tmp_path))
