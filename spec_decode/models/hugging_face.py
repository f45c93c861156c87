# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's T5: its names of the parameters, and its config.json."""

from collections.abc import Iterable
import json
import os
import re

from etils import epath
import numpy as np

from spec_decode.models import transformer

Arrays = dict[str, np.ndarray]  # by slash-joined name

# Parts of a T5X name as Hugging Face has them. {last} is the index of the
# feed-forward block: 1 in the encoder, 2 in the decoder.
_PARTS = {
  'token_embedder': 'shared',
  'relpos_bias': 'block.0.layer.0.SelfAttention.relative_attention_bias',
  'encoder_norm': 'final_layer_norm',
  'decoder_norm': 'final_layer_norm',
  'pre_attention_layer_norm': 'layer.0.layer_norm',
  'pre_self_attention_layer_norm': 'layer.0.layer_norm',
  'pre_cross_attention_layer_norm': 'layer.1.layer_norm',
  'pre_mlp_layer_norm': 'layer.{last}.layer_norm',
  'attention': 'layer.0.SelfAttention',
  'self_attention': 'layer.0.SelfAttention',
  'encoder_decoder_attention': 'layer.1.EncDecAttention',
  'mlp': 'layer.{last}.DenseReluDense',
  'query': 'q',
  'key': 'k',
  'value': 'v',
  'out': 'o',
  **dict.fromkeys(('embedding', 'rel_embedding', 'scale', 'kernel'), 'weight'),
}
_ACTIVATIONS = {
  'relu': ('relu',),
  'gated-gelu': ('gelu', 'linear'),  # the tanh approximation on both sides
  'gated-silu': ('silu', 'linear'),
}
# What the network here keeps fixed.
_FIXED = {
  'relative_attention_num_buckets': 32,
  'relative_attention_max_distance': 128,
  'layer_norm_epsilon': 1e-6,
}


def _name(name: str) -> str:
  """T5X's name of a parameter -> that in a Hugging Face T5."""
  if name == 'decoder/logits_dense/kernel':
    return 'lm_head.weight'
  last = 1 if name.startswith('encoder/') else 2
  parts = name.replace('layers_', 'block.').split('/')
  return '.'.join(_PARTS.get(p, p).format(last=last) for p in parts)


def renamed(arrays: Arrays, expected: Iterable[str]) -> Arrays:
  """Renames what `expected` knows and transposes the [out, in] matrices."""
  names = {_name(name): name for name in expected}
  found, shared = {}, arrays['shared.weight']
  for key, x in arrays.items():
    # Copies of the tied embedding, and a bias of old files that no T5 uses.
    copy = re.search(r'embed_tokens|lm_head', key) and np.array_equal(x, shared)
    unused = 'EncDecAttention.relative_attention_bias' in key
    if key in names or not (copy or unused):
      transpose = x.ndim == 2 and key != 'shared.weight'
      found[names.get(key, key)] = x.T if transpose else x
  return found


def config(path: str | os.PathLike[str]) -> transformer.T5Config:
  """The sizes in `config.json` of a Hugging Face T5 directory.

  Raises:
    ValueError: it is not a T5 1.0 or 1.1, or has a setting that the network
      here keeps fixed.
  """
  file = epath.Path(path).expanduser() / 'config.json'
  raw = json.loads(file.read_text())
  choices = {key: (value,) for key, value in _FIXED.items()}
  choices['model_type'] = ('t5', 'mt5')
  choices['feed_forward_proj'] = tuple(_ACTIVATIONS)
  wrong = [
    f'{key} is {raw[key]}, expected {" or ".join(map(str, values))}'
    for key, values in choices.items()
    if raw.setdefault(key, values[0]) not in values
  ]
  if wrong:
    raise ValueError(f'{file}: {"; ".join(wrong)}. Use a T5 1.0 or 1.1.')
  # Recent writers say tie_word_embeddings=true for every T5 and keep the
  # difference between 1.0 and 1.1 in scale_decoder_outputs.
  tied = raw.get('tie_word_embeddings', True) and raw['model_type'] == 't5'
  return transformer.T5Config(
    vocab_size=raw['vocab_size'],
    emb_dim=raw['d_model'],
    num_heads=raw['num_heads'],
    num_encoder_layers=raw['num_layers'],
    num_decoder_layers=raw.get('num_decoder_layers') or raw['num_layers'],
    head_dim=raw['d_kv'],
    mlp_dim=raw['d_ff'],
    mlp_activations=_ACTIVATIONS[raw['feed_forward_proj']],
    logits_via_embedding=tied and raw.get('scale_decoder_outputs', True),
  )
