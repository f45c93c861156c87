# SPDX-License-Identifier: Apache-2.0
"""T5 1.0 and 1.1 in Flax, with a cache that takes many tokens per call.

Parameter names, shapes and logical axes are T5X's "minimal" T5, so its
checkpoints load unchanged. What differs is the decoder's cache: one call takes
a chunk of tokens for every row, each row at its own position, and overwrites
what the cache held there. Rolling back is passing a smaller position.

Shape letters: B batch, I input length, W chunk width, L cache length,
H heads, D head size, E embedding size, V (padded) vocabulary.
"""

import functools
from typing import Any

from flax import linen as nn
from flax import struct
from flax.linen.partitioning import with_sharding_constraint
import jax
import jax.numpy as jnp

from spec_decode.language_model import LanguageModel
from spec_decode.models import kv_cache
from spec_decode.models import layouts
from spec_decode.models import stacks
from spec_decode.models.layers import Embed
from spec_decode.models.layers import T5Config

Array = jax.Array

# Inputs of fewer tokens are not worth a program of their own.
_LEAST_INPUTS = 32


@struct.dataclass
class Cache:
  """Keys and values of one batch, one array per layer; see `kv_cache`."""

  keys: tuple[Array, ...]  # [B * H, D, L], entry l is of position l
  values: tuple[Array, ...]  # [B * H, L, D]
  cross_keys: tuple[Array, ...]  # [B * H, D, I]
  cross_values: tuple[Array, ...]  # [B * H, I, D]
  inputs_bias: Array  # [B, 1, 1, I], 0 for real inputs, -1e10 for padding


class Transformer(nn.Module):
  """An encoder-decoder T5.

  `__call__` and `encode` have the signatures that T5X's `EncoderDecoderModel`
  calls. `start`, `extend` and `logits` are the cached decoder.

  Attributes:
    config: the sizes; T5X's own `network.T5Config` will do.
    layout: how the decoder's kernels are stored, see `layouts.to_layout`.
  """

  config: T5Config
  layout: str = 'checkpoint'

  def setup(self):
    self.token_embedder = Embed(self.config)
    self.encoder = stacks.Encoder(self.config, self.token_embedder)
    self.decoder = stacks.Decoder(self.config, self.token_embedder, self.layout)

  def encode(
    self, encoder_input_tokens, encoder_segment_ids=None, enable_dropout=True
  ) -> Array:
    """Encodes tokens [B, I] -> [B, I, E]; id 0 is padding."""
    mask = (encoder_input_tokens > 0)[:, None, :]
    if encoder_segment_ids is not None:
      mask &= encoder_segment_ids[:, :, None] == encoder_segment_ids[:, None]
    return self.encoder(
      encoder_input_tokens, _bias(mask)[:, None], not enable_dropout
    )

  def __call__(
    self,
    encoder_input_tokens,
    decoder_input_tokens,
    decoder_target_tokens=None,
    encoder_segment_ids=None,
    decoder_segment_ids=None,
    encoder_positions=None,
    decoder_positions=None,
    *,
    enable_dropout: bool = True,
    decode: bool = False,
  ) -> Array:
    """Teacher-forced logits [B, W, V] of decoder inputs [B, W].

    Causality is by position, never by token value: an id 0 inside the targets
    is an ordinary token. Segment ids, when given, separate packed examples.
    """
    del decoder_target_tokens, encoder_positions, decoder_positions
    if decode:
      raise ValueError(
        'decode=True drives the one-token cache of T5X, which this network'
        ' does not have. Use start, extend and logits instead.'
      )
    encoded = self.encode(
      encoder_input_tokens, encoder_segment_ids, enable_dropout
    )
    batch, width = decoder_input_tokens.shape
    mask = jnp.tril(jnp.ones((1, width, width), bool))
    cross_mask = (encoder_input_tokens > 0)[:, None, :]
    if decoder_segment_ids is not None:
      ids = decoder_segment_ids[:, :, None]
      mask = mask & (ids == decoder_segment_ids[:, None])
      cross_mask = cross_mask & (ids == encoder_segment_ids[:, None])
    hidden, _ = self.decoder(
      decoder_input_tokens,
      self.decoder.cross_keys_values(encoded),
      mask,
      _bias(cross_mask)[:, None],
      jnp.zeros((1,), jnp.int32),
      None,
      not enable_dropout,
    )
    return self.logits(hidden)

  def cross_keys_values(self, encoder_input_tokens: Array) -> list:
    """Keys and values of the inputs [B, I] for each decoder layer.

    Inputs are padded to a width that holds every batch. Where a half or a
    quarter of it holds this one, only that is computed; the rest is never
    attended to.
    """
    width = encoder_input_tokens.shape[1]

    def over(some: int):
      def keys_values(self, tokens):
        encoded = self.encode(tokens[:, :some], enable_dropout=False)
        rest = [(0, width - some)]
        return [
          (
            jnp.pad(keys, [(0, 0)] * 2 + rest),
            jnp.pad(values, [(0, 0)] + rest + [(0, 0)]),
          )
          for keys, values in self.decoder.cross_keys_values(encoded)
        ]

      return keys_values

    shorter = [n for n in (width // 4, width // 2) if n >= _LEAST_INPUTS]
    tokens = encoder_input_tokens
    too_long = [jnp.any(tokens[:, n:] != 0).astype(int) for n in shorter]
    branches = [over(n) for n in (*shorter, width)]
    return nn.switch(sum(too_long), branches, self, tokens)

  def start(self, encoder_input_tokens: Array, capacity: int) -> Cache:
    """Encodes the inputs and allocates room for `capacity` tokens per row."""
    cfg = self.config
    cross = self.cross_keys_values(encoder_input_tokens)
    keys, values = kv_cache.empty(cfg, encoder_input_tokens.shape[0], capacity)
    return Cache(
      keys=keys,
      values=values,
      cross_keys=tuple(keys for keys, _ in cross),
      cross_values=tuple(values for _, values in cross),
      inputs_bias=_bias(encoder_input_tokens > 0)[:, None, None],
    )

  def extend(
    self, cache: Cache, tokens: Array, position: Array
  ) -> tuple[Array, Cache]:
    """Feeds tokens [B, W] at positions position[b] + 0..W-1.

    Whatever a row's cache held at or after its position is forgotten.

    Returns:
      Hidden states [B, W, E], to be given to `logits`, and the cache.
    """
    hidden, written = self.decoder(
      tokens,
      list(zip(cache.cross_keys, cache.cross_values)),
      kv_cache.causal_mask(position, tokens.shape[1], cache.keys[0].shape[2]),
      cache.inputs_bias,
      position,
      list(zip(cache.keys, cache.values)),
    )
    keys, values = zip(*written)
    return hidden, cache.replace(keys=keys, values=values)

  def logits(self, hidden: Array) -> Array:
    """Hidden states [..., E] -> float32 logits [..., V]."""
    logits = self.decoder.logits(hidden)
    if logits.ndim == 3:
      logits = with_sharding_constraint(logits, ('batch', 'length', 'vocab'))
    return logits


def _bias(mask: Array) -> Array:
  return jnp.where(mask, 0.0, stacks.MASKED).astype(jnp.float32)


@functools.singledispatch
def network(config: Any, layout: str = 'checkpoint') -> nn.Module:
  """The module of a configuration; other kinds register theirs.

  It has the methods of `Transformer`: called with (inputs, tokens) for
  teacher-forced logits, and `start`, `extend` and `logits`.
  """
  return Transformer(config, layout)


def initial_params(config: T5Config, seed: int, dtype: str = 'float32') -> Any:
  """Fresh parameters, the values that T5X draws from the same key.

  Drawn in float32; those of large models never stand in memory so as a whole.
  """
  return _init(config, jax.random.key(seed), dtype)


@functools.partial(jax.jit, static_argnames=('config', 'dtype'))
def _init(config, key, dtype):
  tokens = jnp.ones((1, 2), jnp.int32)
  params = network(config).init(key, tokens, tokens, enable_dropout=False)
  return jax.tree.map(lambda x: x.astype(dtype), params['params'])


@functools.cache
def language_model(
  config: T5Config,
  vocab_size: int | None = None,
  layout: str = 'checkpoint',
  shortlist: tuple[int, ...] = (),
) -> LanguageModel:
  """A network as the decoding loops want it; inputs are token ids [B, I].

  The same arguments give the same object, so nothing compiles twice.

  Args:
    config: the sizes.
    vocab_size: number of real ids; default all of them.
    layout: of the parameters that the functions take; `prepare` brings a
      checkpoint's into it. See `layouts.to_layout`.
    shortlist: the only ids that a draft guesses, () for all; see there.
  """
  module = network(config, layout)
  call = lambda method: (
    lambda params, *args: module.apply({'params': params}, *args, method=method)
  )
  return LanguageModel(
    start=call('start'),
    extend=call('extend'),
    logits=call('logits'),
    vocab_size=vocab_size or config.vocab_size,
    prepare=lambda params: layouts.to_layout(params, layout, shortlist),
  )
