# SPDX-License-Identifier: Apache-2.0
"""Decoder-only transformers on the blocks of `layers.py`.

Two kinds, by configuration: GPT-like with learned absolute positions (the
paper's language-modelling pair) and LaMDA-shaped with T5's relative attention
and gated GELU. The cache is that of `transformer.py`: chunks of many tokens,
each row at its own position. Nothing is encoded: what a row goes on from is
its decoder prompt.

Parameter names are those of the encoder-decoder's decoder. Shape letters: B
batch, W chunk width, L cache length, H heads, D head size, E embedding size, V
(padded) vocabulary.
"""

import functools

from flax import linen as nn
from flax import struct
from flax.linen.partitioning import param_with_axes
from flax.linen.partitioning import with_sharding_constraint
import jax
import jax.numpy as jnp

from spec_decode.models import transformer
from spec_decode.models.layers import Attention
from spec_decode.models.layers import Dense
from spec_decode.models.layers import Embed
from spec_decode.models.layers import LayerNorm
from spec_decode.models.layers import Mlp
from spec_decode.models.layers import RelativeBias
from spec_decode.models.layers import T5Config
from spec_decode.models.layers import write_rows

Array = jax.Array

# Added to the attention logits of masked keys, as in `transformer.py`.
_MASKED = -1e10


@struct.dataclass
class DecoderOnlyConfig(T5Config):
  """Sizes of a decoder without an encoder; fields as `T5Config`.

  GPT-like is `mlp_activations=('gelu',)` and `num_positions` of the longest
  text; LaMDA-shaped is `('gelu', 'linear')` and 0.

  Attributes:
    num_positions: rows of a learned table of absolute positions; 0 for T5's
      relative bias, which knows no longest text.
  """

  num_encoder_layers: int = struct.field(pytree_node=False, default=0)
  num_positions: int = struct.field(pytree_node=False, default=0)


@struct.dataclass
class Cache:
  """Keys and values of one batch, one array per layer; see `transformer`."""

  keys: tuple[Array, ...]  # [B * H, L, D], entry l is of position l
  values: tuple[Array, ...]  # [B * H, L, D]


class Positions(nn.Module):
  """A learned vector per position."""

  config: DecoderOnlyConfig

  @nn.compact
  def __call__(self, position: Array) -> Array:
    """Positions [B, W] -> [B, W, E]; those of parked rows get any vector."""
    cfg = self.config
    table = param_with_axes(
      'embedding',
      # GPT-2's ratio to the deviation of the token embeddings.
      nn.initializers.normal(stddev=0.5),
      (cfg.num_positions, cfg.emb_dim),
      jnp.float32,
      axes=('positions', 'embed'),
    )
    return jnp.take(table, position, axis=0, mode='clip').astype(cfg.dtype)


class Layer(nn.Module):
  """Causal self-attention, then the feed-forward block."""

  config: DecoderOnlyConfig
  layout: str = 'checkpoint'

  def setup(self):
    cfg, kwargs = self.config, transformer.layout_flags(self.layout)
    self.pre_self_attention_layer_norm = LayerNorm(cfg.dtype)
    self.self_attention = Attention(cfg, **kwargs)
    self.pre_mlp_layer_norm = LayerNorm(cfg.dtype)
    self.mlp = Mlp(cfg, **kwargs)
    self.dropout = nn.Dropout(cfg.dropout_rate, broadcast_dims=(-2,))

  def __call__(self, x: Array, bias: Array, cached, deterministic: bool):
    """One layer over x [B, W, E].

    Args:
      x: the chunk's activations.
      bias: broadcastable to [B, H, W, L], causal mask included.
      cached: None to attend within the chunk, or (keys, values, position
        [B]); the chunk is then written at its positions first.
      deterministic: no dropout.

    Returns:
      Activations [B, W, E] and the (keys, values) attended to.
    """
    drop = functools.partial(self.dropout, deterministic=deterministic)
    y = self.pre_self_attention_layer_norm(x)
    queries, keys, values = self.self_attention.queries_keys_values(y)
    if cached is not None:
      old_keys, old_values, position = cached
      keys = write_rows(old_keys, keys, position)
      values = write_rows(old_values, values, position)
    x = x + drop(self.self_attention(queries, keys, values, bias, drop))
    y = self.pre_mlp_layer_norm(x)
    return x + drop(self.mlp(y, deterministic)), (keys, values)


class Decoder(nn.Module):
  """The stack, for whole sequences and for cached chunks."""

  config: DecoderOnlyConfig
  token_embedder: nn.Module
  layout: str = 'checkpoint'

  def setup(self):
    cfg = self.config
    if cfg.num_positions:
      self.positions = Positions(cfg)
    else:
      self.relpos_bias = RelativeBias(cfg, bidirectional=False)
    self.layers = [
      Layer(cfg, self.layout) for _ in range(cfg.num_decoder_layers)
    ]
    self.decoder_norm = LayerNorm(cfg.dtype)
    self.dropout = nn.Dropout(cfg.dropout_rate, broadcast_dims=(-2,))
    if not cfg.logits_via_embedding:
      self.logits_dense = Dense(
        cfg.vocab_size,
        ('embed', 'vocab'),
        weights_left=transformer.layout_flags(self.layout)['weights_left'],
      )

  def __call__(
    self, tokens: Array, position: Array, length: int, cached, deterministic
  ):
    """Tokens [B, W] at positions position[b] + 0..W-1 of `length`.

    `cached` is None or one (keys, values) per layer.

    Returns:
      Hidden states [B, W, E] and one (keys, values) per layer.
    """
    cfg = self.config
    drop = functools.partial(self.dropout, deterministic=deterministic)
    query_position = position[:, None] + jnp.arange(tokens.shape[1])
    mask = jnp.arange(length) <= query_position[..., None]  # [B, W, L]
    x = self.token_embedder(tokens)
    bias = jnp.zeros((), cfg.dtype)
    if cfg.num_positions:
      x += self.positions(query_position)
    else:
      bias = self.relpos_bias(query_position, length)
    bias = jnp.where(mask[:, None], bias, jnp.asarray(_MASKED, bias.dtype))
    x = with_sharding_constraint(drop(x), ('batch', 'length', 'embed'))
    written = []
    for i, layer in enumerate(self.layers):
      entry = None if cached is None else (*cached[i], position)
      x, keys_values = layer(x, bias, entry, deterministic)
      written.append(keys_values)
    return drop(self.decoder_norm(x)), written

  def logits(self, hidden: Array) -> Array:
    cfg = self.config
    if not cfg.logits_via_embedding:
      return self.logits_dense(hidden)
    return self.token_embedder.attend(hidden) / jnp.sqrt(cfg.emb_dim)


class DecoderOnly(nn.Module):
  """The methods of `transformer.Transformer`, without an encoder.

  Attributes:
    config: the sizes.
    layout: as there.
  """

  config: DecoderOnlyConfig
  layout: str = 'checkpoint'

  def setup(self):
    self.token_embedder = Embed(self.config)
    self.decoder = Decoder(self.config, self.token_embedder, self.layout)

  def __call__(
    self,
    inputs: Array,
    decoder_input_tokens: Array,
    *,
    enable_dropout: bool = True,
  ) -> Array:
    """Teacher-forced logits [B, W, V] of tokens [B, W]; inputs are not read."""
    del inputs
    batch, width = decoder_input_tokens.shape
    self._check(width)
    hidden, _ = self.decoder(
      decoder_input_tokens,
      jnp.zeros((batch,), jnp.int32),
      width,
      None,
      not enable_dropout,
    )
    return self.logits(hidden)

  def start(self, inputs: Array, capacity: int) -> Cache:
    """Room for `capacity` tokens of each of the B rows that inputs have."""
    cfg = self.config
    self._check(capacity)
    shape = (inputs.shape[0] * cfg.num_heads, capacity, cfg.head_dim)
    empty = lambda: tuple(
      jnp.zeros(shape, cfg.dtype) for _ in range(cfg.num_decoder_layers)
    )
    return Cache(keys=empty(), values=empty())

  def extend(
    self, cache: Cache, tokens: Array, position: Array
  ) -> tuple[Array, Cache]:
    """As `transformer.Transformer.extend`."""
    hidden, written = self.decoder(
      tokens,
      position,
      cache.keys[0].shape[1],
      list(zip(cache.keys, cache.values)),
      True,
    )
    keys, values = zip(*written)
    return hidden, Cache(keys, values)

  def logits(self, hidden: Array) -> Array:
    """Hidden states [..., E] -> float32 logits [..., V]."""
    logits = self.decoder.logits(hidden)
    if logits.ndim == 3:
      logits = with_sharding_constraint(logits, ('batch', 'length', 'vocab'))
    return logits

  def _check(self, length: int) -> None:
    """Refuses texts that the table of positions cannot hold."""
    known = self.config.num_positions
    if known and length > known:
      raise ValueError(
        f'Expected texts of at most {known} tokens, prompt, new tokens and one'
        f' block of guesses together, got room for {length}. Lower'
        ' max_new_tokens or the prompt, or train with more num_positions.'
      )


@transformer.network.register
def _(config: DecoderOnlyConfig, layout: str = 'checkpoint') -> DecoderOnly:
  return DecoderOnly(config, layout)
