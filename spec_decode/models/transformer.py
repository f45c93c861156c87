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
from spec_decode.models.layers import Attention
from spec_decode.models.layers import Dense
from spec_decode.models.layers import Embed
from spec_decode.models.layers import LayerNorm
from spec_decode.models.layers import Mlp
from spec_decode.models.layers import RelativeBias
from spec_decode.models.layers import T5Config

Array = jax.Array

# Added to the attention logits of masked keys; T5X's value.
_MASKED = -1e10
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


def _dropout(config: T5Config, **kwargs) -> nn.Dropout:
  return nn.Dropout(config.dropout_rate, broadcast_dims=(-2,), **kwargs)


class EncoderLayer(nn.Module):
  """Self-attention over all inputs, then the feed-forward block."""

  config: T5Config

  @nn.compact
  def __call__(self, x: Array, bias: Array, deterministic: bool) -> Array:
    cfg = self.config
    dropout = functools.partial(_dropout(cfg), deterministic=deterministic)
    y = LayerNorm(cfg.dtype, name='pre_attention_layer_norm')(x)
    attention = Attention(cfg, name='attention')
    projected = attention.queries_keys_values(y)
    x = x + dropout(attention(*projected, bias, dropout))
    y = LayerNorm(cfg.dtype, name='pre_mlp_layer_norm')(x)
    return x + dropout(Mlp(cfg, name='mlp')(y, deterministic))


class DecoderLayer(nn.Module):
  """Causal self-attention, cross-attention if there is any, feed-forward."""

  config: T5Config
  layout: str = 'checkpoint'
  cross_attention: bool = True

  def setup(self):
    cfg, fused = self.config, self.layout == 'fused'
    self.pre_self_attention_layer_norm = LayerNorm(cfg.dtype)
    self.self_attention = Attention(cfg, few_rows=fused, fused=fused)
    if self.cross_attention:
      self.pre_cross_attention_layer_norm = LayerNorm(cfg.dtype)
      self.encoder_decoder_attention = Attention(cfg, few_rows=fused)
    self.pre_mlp_layer_norm = LayerNorm(cfg.dtype)
    self.mlp = Mlp(cfg, fused=fused)
    self.dropout = _dropout(cfg)

  def cross_keys_values(self, encoded: Array) -> tuple[Array, Array]:
    return self.encoder_decoder_attention.keys_values(encoded)

  def __call__(
    self, x: Array, cross, bias: Array, cross_bias: Array, cached, deterministic
  ):
    """One layer over x [B, W, E].

    Args:
      x: the chunk's activations.
      cross: keys [B * H, D, I] and values [B * H, I, D] of the inputs; None
        without cross-attention.
      bias: [B, H, W, L], causal mask included.
      cross_bias: broadcastable to [B, H, W, I].
      cached: None to attend within the chunk, or (keys, values, position
        [B]); the chunk is then written at its positions first.
      deterministic: no dropout.

    Returns:
      Activations [B, W, E] and the (keys, values) attended to.
    """
    drop = functools.partial(self.dropout, deterministic=deterministic)
    y = self.pre_self_attention_layer_norm(x)
    queries, *keys_values = self.self_attention.queries_keys_values(y)
    if cached is not None:
      keys, values, position = cached
      keys_values = kv_cache.write(keys, values, keys_values, position)
    x = x + drop(self.self_attention(queries, *keys_values, bias, drop))
    if self.cross_attention:
      y = self.pre_cross_attention_layer_norm(x)
      attention = self.encoder_decoder_attention
      queries = attention.queries(y)
      x = x + drop(attention(queries, *cross, cross_bias, drop))
    y = self.pre_mlp_layer_norm(x)
    return x + drop(self.mlp(y, deterministic)), keys_values


class Encoder(nn.Module):
  """The input stack."""

  config: T5Config
  token_embedder: nn.Module

  @nn.compact
  def __call__(self, tokens: Array, bias: Array, deterministic: bool) -> Array:
    cfg = self.config
    drop = functools.partial(_dropout(cfg), deterministic=deterministic)
    length = tokens.shape[1]
    relative = RelativeBias(cfg, bidirectional=True, name='relpos_bias')
    bias = bias + relative(jnp.arange(length)[None], length)
    x = drop(self.token_embedder(tokens))
    x = with_sharding_constraint(x, ('batch', 'length', 'embed'))
    for i in range(cfg.num_encoder_layers):
      x = EncoderLayer(cfg, name=f'layers_{i}')(x, bias, deterministic)
    x = LayerNorm(cfg.dtype, name='encoder_norm')(x)
    return nn.Dropout(cfg.dropout_rate)(x, deterministic=deterministic)


class Decoder(nn.Module):
  """The output stack, for whole sequences and for cached chunks."""

  config: T5Config
  token_embedder: nn.Module
  layout: str = 'checkpoint'
  cross_attention: bool = True

  def setup(self):
    cfg = self.config
    self.relpos_bias = RelativeBias(cfg, bidirectional=False)
    self.layers = [
      DecoderLayer(cfg, self.layout, self.cross_attention)
      for _ in range(cfg.num_decoder_layers)
    ]
    self.decoder_norm = LayerNorm(cfg.dtype)
    self.dropout = _dropout(cfg)
    fused = self.layout == 'fused'
    self.tied = cfg.logits_via_embedding and not fused
    if not self.tied:
      self.logits_dense = Dense(
        cfg.vocab_size, ('embed', 'vocab'), few_rows=fused
      )

  def embed(self, tokens: Array, query_position: Array) -> Array:
    """Tokens [B, W] at positions [B or 1, W] -> [B, W, E]."""
    del query_position
    return self.token_embedder(tokens)

  def attention_bias(self, query_position: Array, length: int) -> Array:
    """Bias of the queries for `length` keys, broadcastable to [B, H, W, L]."""
    return self.relpos_bias(query_position, length)

  def cross_keys_values(self, encoded: Array):
    return [layer.cross_keys_values(encoded) for layer in self.layers]

  def __call__(
    self, tokens, cross, mask, cross_bias, position, cached, deterministic=True
  ):
    """Hidden states [B, W, E] of tokens [B, W]; see `DecoderLayer`.

    `mask` [B or 1, W, L] is True where a query may see a key, and `cached` is
    None or one (keys, values) per layer; `cross` is one per layer, or None.
    """
    drop = functools.partial(self.dropout, deterministic=deterministic)
    query_position = position[:, None] + jnp.arange(tokens.shape[1])
    bias = self.attention_bias(query_position, mask.shape[-1])
    bias = jnp.where(mask[:, None], bias, jnp.asarray(_MASKED, bias.dtype))
    x = drop(self.embed(tokens, query_position))
    x = with_sharding_constraint(x, ('batch', 'length', 'embed'))
    written = []
    for i, layer in enumerate(self.layers):
      entry = None if cached is None else (*cached[i], position)
      x, keys_values = layer(
        x, cross and cross[i], bias, cross_bias, entry, deterministic
      )
      written.append(keys_values)
    return drop(self.decoder_norm(x)), written

  def logits(self, hidden: Array) -> Array:
    cfg = self.config
    output = self.token_embedder.attend if self.tied else self.logits_dense
    # The tied output layer of 1.0 is scaled; the untied one of 1.1 is not.
    scale = jnp.sqrt(cfg.emb_dim) if cfg.logits_via_embedding else 1
    return output(hidden) / scale


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
    self.encoder = Encoder(self.config, self.token_embedder)
    self.decoder = Decoder(self.config, self.token_embedder, self.layout)

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

    Inputs are padded to a width that holds every batch. Where half of it holds
    this one, only that half is computed; the rest is never attended to.
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

    half = width // 2
    if half < _LEAST_INPUTS:
      return over(width)(self, encoder_input_tokens)
    short = jnp.all(encoder_input_tokens[:, half:] == 0)
    return nn.cond(short, over(half), over(width), self, encoder_input_tokens)

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
  return jnp.where(mask, 0.0, _MASKED).astype(jnp.float32)


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
  config: T5Config, vocab_size: int | None = None, layout: str = 'checkpoint'
) -> LanguageModel:
  """A network as the decoding loops want it; inputs are token ids [B, I].

  The same arguments give the same object, so nothing compiles twice.

  Args:
    config: the sizes.
    vocab_size: number of real ids; default all of them.
    layout: of the parameters that the functions take; `prepare` brings a
      checkpoint's into it. See `layouts.to_layout`.
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
    prepare=lambda params: layouts.to_layout(params, layout),
  )
