# SPDX-License-Identifier: Apache-2.0
"""Tabulated language models whose law can be written down in full.

The next token depends on the whole prefix, read back from the cache by
position: a stale, missing or misplaced entry changes the logits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_decode.language_model import LanguageModel
from spec_decode.models import transformer

CONTEXTS = 61


def context(tokens, input_id, xp=np):
  """Row of the table for a prefix tokens [..., length]."""
  place = xp.arange(tokens.shape[-1])
  weights = place * place * 7 + 3 * place + 5
  return (xp.sum((tokens + 1) * weights, axis=-1) + input_id) % CONTEXTS


def _start(params, inputs, capacity):
  del params
  return {
    'tokens': jnp.full((inputs.shape[0], capacity), -7, jnp.int32),
    'input': inputs[:, 0],
  }


def _extend(params, cache, tokens, position):
  table = params['table']
  rows, width = tokens.shape
  index = position[:, None] + jnp.arange(width)
  stored = (
    cache['tokens']
    .at[jnp.arange(rows)[:, None], index]
    .set(tokens, mode='drop')
  )
  seen = jnp.arange(stored.shape[1]) <= index[..., None]  # [B, W, L]
  place = jnp.arange(stored.shape[1])
  weights = place * place * 7 + 3 * place + 5
  terms = jnp.where(seen, (stored[:, None] + 1) * weights, 0)
  row = (terms.sum(-1) + cache['input'][:, None]) % CONTEXTS
  return table[row], cache | {'tokens': stored}


def _logits(params, hidden):
  del params
  return hidden


@functools.cache
def table_model(vocab_size: int) -> LanguageModel:
  return LanguageModel(_start, _extend, _logits, vocab_size)


def table_params(seed: int, width: int, sharpness: float = 1.5):
  """Logits of every context, [CONTEXTS, width]."""
  table = np.random.default_rng(seed).normal(size=(CONTEXTS, width))
  return {'table': jnp.asarray(sharpness * table, jnp.float32)}


def probabilities(params, tokens, input_id, standardize):
  """p(. | prefix) for one prefix, through `standardize` on its logits."""
  row = context(np.asarray(tokens), input_id)
  return standardize(np.asarray(params['table'][row], np.float64))


def greedy(params, input_id, prompt, count, eos_id=-1, allowed=None):
  """The argmax continuation of one prompt, token by token in NumPy.

  Args:
    params: tables of a `table_model`.
    input_id: the row's input.
    prompt: its decoder prompt.
    count: length cap.
    eos_id: ends the row.
    allowed: ids that may occur; default all but 0.
  """
  tokens = list(prompt)
  table = np.asarray(params['table'])
  allowed = np.arange(1, table.shape[1]) if allowed is None else allowed
  for _ in range(count):
    logits = table[context(np.asarray(tokens), input_id)]
    tokens.append(int(allowed[np.argmax(logits[allowed])]))
    if tokens[-1] == eos_id:
      break
  return tokens[len(prompt) :]


def never_right(params):
  """A draft that avoids the target's most likely id in every context."""
  table = params['table']
  return {'table': jnp.where(table == table.max(-1, keepdims=True), -9, -table)}


def nearby(params, seed: int, noise: float = 0.7):
  """A draft that often agrees with the target."""
  shape = params['table'].shape
  return {
    'table': params['table']
    + noise * jax.random.normal(jax.random.key(seed), shape)
  }


def mixed(params, seed: int, width: int = 0):
  """A draft that is near, unrelated, never right or equal, by context.

  Args:
    params: the target's.
    seed: of the noise.
    width: of the draft's logits; default the target's.
  """
  table = np.asarray(params['table'])
  kinds = [
    nearby(params, seed)['table'],
    table_params(seed + 1, table.shape[1])['table'],
    never_right(params)['table'],
    table,
  ]
  chosen = np.arange(CONTEXTS) % len(kinds)
  table = np.stack(kinds)[chosen, np.arange(CONTEXTS)]
  if width > table.shape[1]:
    # Much mass on ids that the target does not have.
    extra = width - table.shape[1]
    table = np.pad(table, ((0, 0), (0, extra)), constant_values=3)
  return {'table': jnp.asarray(table[:, : width or None], jnp.float32)}


def _scripted_extend(params, cache, tokens, position):
  rows, width = tokens.shape
  index = position[:, None] + jnp.arange(width)
  script = params['script']
  following = script.at[jnp.arange(rows)[:, None], index].get(mode='clip')
  return 9.0 * jax.nn.one_hot(following, 12), cache


@functools.cache
def scripted_model() -> LanguageModel:
  """Says params['script'][b, i] as token i of row b, whatever came before."""
  start = lambda params, inputs, capacity: jnp.zeros(inputs.shape[0])
  return LanguageModel(start, _scripted_extend, _logits, 12)


# Of the least T5 that has everything.
T5_SIZES = {
  'emb_dim': 16,
  'num_heads': 2,
  'num_encoder_layers': 1,
  'num_decoder_layers': 1,
  'head_dim': 8,
  'mlp_dim': 24,
  'mlp_activations': ('gelu', 'linear'),
}
TINY_T5 = transformer.T5Config(
  vocab_size=50,
  emb_dim=16,
  num_heads=3,
  num_encoder_layers=1,
  num_decoder_layers=2,
  head_dim=8,
  mlp_dim=24,
  mlp_activations=('gelu', 'linear'),
)
# T5 1.0 instead of 1.1.
TINY_TIED_T5 = TINY_T5.replace(
  mlp_activations=('relu',), logits_via_embedding=True
)


def t5_shapes(config):
  """The parameters of a network as shapes."""
  return jax.eval_shape(lambda: transformer.initial_params(config, 0))


def t5_params(config, seed: int):
  """Random parameters whose greedy outputs are varied."""
  rng = np.random.default_rng(seed)

  def leaf(path, x):
    name = path[-1].key
    noise = rng.standard_normal(x.shape, np.float32)
    if name == 'kernel':
      noise /= np.sqrt(x.shape[0])
    if name == 'scale':
      noise = 1 + 0.2 * noise
    return jnp.asarray(noise)

  return jax.tree_util.tree_map_with_path(leaf, t5_shapes(config))


def perturbed(params, seed: int, noise: float):
  """Parameters of a draft that often agrees with the target."""
  rng = np.random.default_rng(seed)
  shake = lambda x: x * (1 + noise * rng.standard_normal(x.shape, np.float32))
  return jax.tree.map(lambda x: jnp.asarray(shake(x), x.dtype), params)


def assert_chunks_equal_one_pass(feed, model, params, cache, tokens, exact):
  """Feeds three rows in chunks, with roll-back, until all have been read.

  Args:
    feed: (model, params, cache, chunk, position) -> (logits, cache).
    model, params, cache: cache is empty, with room for all tokens.
    tokens: [3, L].
    exact: logits [3, L, V] of one pass without a cache.

  Returns:
    The cache.
  """
  rng, length = np.random.default_rng(1), tokens.shape[1]
  # The next position of each row; they soon differ.
  position = np.zeros(3, int)
  read = np.zeros((3, length), int)
  for call in range(60):
    width = (40, 5, 1)[call % 3]
    columns = position[:, None] + np.arange(width)
    inside = columns < length
    columns = np.minimum(columns, length - 1)
    chunk = np.take_along_axis(tokens, columns, 1)
    if call % 4 == 1:
      # A block that is thrown away: the next call goes back over it.
      junk = rng.integers(0, 50, chunk.shape)
      _, cache = feed(model, params, cache, junk, position)
    logits, cache = feed(model, params, cache, chunk, position)
    good = np.take_along_axis(exact, columns[..., None], 1)
    np.testing.assert_allclose(logits[inside], good[inside], atol=1e-5)
    np.add.at(read, (np.arange(3)[:, None], columns), inside)
    # Rows keep all of the block, a part or nothing, and may go back further.
    kept = rng.choice([width, width // 2, 0, -3], 3)
    position = np.clip(position + kept, 0, length - 2)
  assert (read >= 1).all() and (read[:, 129:] >= 2).any(1).all()
  return cache
