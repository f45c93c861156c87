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

from flax import linen as nn
from flax import struct
from flax.linen.partitioning import param_with_axes
from flax.linen.partitioning import with_sharding_constraint
import jax
import jax.numpy as jnp

from spec_decode.models import kv_cache
from spec_decode.models import stacks
from spec_decode.models import transformer
from spec_decode.models.layers import Embed
from spec_decode.models.layers import T5Config

Array = jax.Array


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

  def check_length(self, length: int) -> None:
    if self.num_positions and length > self.num_positions:
      raise ValueError(
        f'Expected texts of at most {self.num_positions} tokens, prompt, new'
        f' tokens and one block of guesses together, got room for {length}.'
        ' Lower max_new_tokens or the prompt, or train with more num_positions.'
      )


@struct.dataclass
class Cache:
  """Keys and values of one batch, one array per layer; see `kv_cache`."""

  keys: tuple[Array, ...]  # [B * H, D, L], entry l is of position l
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


class Decoder(stacks.Decoder):
  """That of an encoder-decoder without its cross-attention."""

  cross_attention: bool = False

  def setup(self):
    super().setup()
    if self.config.num_positions:
      self.positions = Positions(self.config)

  def embed(self, tokens: Array, query_position: Array) -> Array:
    x = self.token_embedder(tokens)
    if self.config.num_positions:
      x += self.positions(query_position)
    return x

  def attention_bias(self, query_position: Array, length: int) -> Array:
    if self.config.num_positions:
      return jnp.zeros((), self.config.dtype)
    return super().attention_bias(query_position, length)


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
    self.config.check_length(width)
    position = jnp.zeros((batch,), jnp.int32)
    hidden, _ = self._decode(
      decoder_input_tokens, position, width, None, not enable_dropout
    )
    return self.logits(hidden)

  def _decode(self, tokens, position, length, cached, deterministic):
    """Runs the stack over a chunk that sees itself and what precedes it."""
    mask = kv_cache.causal_mask(position, tokens.shape[1], length)
    return self.decoder(
      tokens, None, mask, None, position, cached, deterministic
    )

  def start(self, inputs: Array, capacity: int) -> Cache:
    """Room for `capacity` tokens of each of the B rows that inputs have."""
    cfg = self.config
    cfg.check_length(capacity)
    return Cache(*kv_cache.empty(cfg, inputs.shape[0], capacity))

  def extend(
    self, cache: Cache, tokens: Array, position: Array
  ) -> tuple[Array, Cache]:
    """As `transformer.Transformer.extend`."""
    hidden, written = self._decode(
      tokens,
      position,
      cache.keys[0].shape[2],
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


@transformer.network.register
def _(config: DecoderOnlyConfig, layout: str = 'checkpoint') -> DecoderOnly:
  return DecoderOnly(config, layout)
