# SPDX-License-Identifier: Apache-2.0
"""Encoder and decoder of `transformer.py`: layers on top of one another.

Shape letters: B batch, W chunk width, L cache length, I input length, H heads,
D head size, E embedding size.
"""

import functools

from flax import linen as nn
from flax.linen.partitioning import with_sharding_constraint
import jax
import jax.numpy as jnp

from spec_decode.models import kv_cache
from spec_decode.models.layers import Attention
from spec_decode.models.layers import Dense
from spec_decode.models.layers import LayerNorm
from spec_decode.models.layers import Mlp
from spec_decode.models.layers import RelativeBias
from spec_decode.models.layers import T5Config

Array = jax.Array

# Added to the attention logits of masked keys; T5X's value.
MASKED = -1e10


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
    # Only prepared parameters have one, see `layouts.to_layout`.
    self.shortlist = self.get_variable('params', 'shortlist')
    short = self.shortlist is not None
    self.tied = cfg.logits_via_embedding and not (fused or short)
    if not self.tied:
      size = len(self.shortlist) if short else cfg.vocab_size
      self.logits_dense = Dense(size, ('embed', 'vocab'), few_rows=fused)

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
    bias = jnp.where(mask[:, None], bias, jnp.asarray(MASKED, bias.dtype))
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
    logits = output(hidden) / scale
    if self.shortlist is None:
      return logits
    never = jnp.full((*logits.shape[:-1], cfg.vocab_size), -jnp.inf)
    return never.at[..., self.shortlist].set(
      logits, indices_are_sorted=True, unique_indices=True
    )
