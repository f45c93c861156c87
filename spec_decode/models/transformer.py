# SPDX-License-Identifier: Apache-2.0
"""T5 1.0 and 1.1 in Flax, with a cache that takes many tokens per call.

Parameter names, shapes and logical axes are T5X's "minimal" T5, so its
checkpoints load unchanged. What differs is the decoder's cache: one call takes
a chunk of tokens for every row, each row at its own position, and overwrites
what the cache held there. Rolling back is passing a smaller position.

Shape letters: B batch, I input length, W chunk width, L cache length,
H heads, D head size, E embedding size, V (padded) vocabulary.
"""

from collections.abc import Sequence
import functools
from typing import Any

from flax import linen as nn
from flax import struct
from flax.linen.partitioning import param_with_axes
from flax.linen.partitioning import with_sharding_constraint
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_decode.language_model import LanguageModel

Array = jax.Array

# Added to the attention logits of masked keys; T5X's value.
_MASKED = -1e10
_NUM_BUCKETS = 32
_MAX_DISTANCE = 128


@struct.dataclass
class T5Config:
  """Sizes of a T5. Field names are those of T5X's `network.T5Config`.

  1.0 is `mlp_activations=('relu',), logits_via_embedding=True`; 1.1 is
  `('gelu', 'linear')` and False.
  """

  vocab_size: int = struct.field(pytree_node=False)
  dtype: Any = struct.field(pytree_node=False, default='float32')
  emb_dim: int = struct.field(pytree_node=False, default=512)
  num_heads: int = struct.field(pytree_node=False, default=8)
  num_encoder_layers: int = struct.field(pytree_node=False, default=6)
  num_decoder_layers: int = struct.field(pytree_node=False, default=6)
  head_dim: int = struct.field(pytree_node=False, default=64)
  mlp_dim: int = struct.field(pytree_node=False, default=2048)
  mlp_activations: Sequence[str] = struct.field(
    pytree_node=False, default=('relu',)
  )
  dropout_rate: float = struct.field(pytree_node=False, default=0.0)
  logits_via_embedding: bool = struct.field(pytree_node=False, default=False)
  float32_attention_logits: bool = struct.field(
    pytree_node=False, default=False
  )


@struct.dataclass
class Cache:
  """Keys and values of one batch, one array per decoder layer.

  Heads are folded into the batch axis because that is the shape the attention
  products read: XLA then updates the arrays in place inside a loop.
  """

  keys: tuple[Array, ...]  # [B * H, L, D], entry l is of position l
  values: tuple[Array, ...]  # [B * H, L, D]
  cross_keys: tuple[Array, ...]  # [B * H, I, D]
  cross_values: tuple[Array, ...]  # [B * H, I, D]
  inputs_bias: Array  # [B, 1, 1, I], 0 for real inputs, -1e10 for padding


def relative_position_bucket(
  distance: np.ndarray, bidirectional: bool
) -> np.ndarray:
  """T5's bucket of `distance` = key position - query position, as NumPy."""
  buckets = _NUM_BUCKETS
  offset = np.zeros_like(distance)
  if bidirectional:
    buckets //= 2
    offset = (distance > 0) * buckets
    distance = np.abs(distance)
  else:
    distance = np.maximum(-distance, 0)
  exact = buckets // 2
  far = exact + (
    np.log(distance.astype(np.float32) / exact + np.finfo(np.float32).eps)
    / np.log(_MAX_DISTANCE / exact)
    * (buckets - exact)
  ).astype(np.int32)
  far = np.minimum(far, buckets - 1)
  return (offset + np.where(distance < exact, distance, far)).astype(np.int32)


class Dense(nn.Module):
  """Linear map of the last axis, without bias.

  With `weights_left` the kernel is stored [out, in] and stands on the left of
  the product. A CPU then reads it once per call where it would otherwise
  repack it whenever there is more than one row; the barrier keeps XLA from
  folding the transposition back.
  """

  features: int
  kernel_axes: tuple[str, str]
  dtype: Any = jnp.float32
  scale: float = 1.0
  init: str = 'truncated_normal'
  weights_left: bool = False

  @nn.compact
  def __call__(self, x: Array) -> Array:
    axes = self.kernel_axes
    shape = (x.shape[-1], self.features)
    if self.weights_left:
      axes, shape = axes[::-1], shape[::-1]
    base = nn.initializers.variance_scaling(1.0, 'fan_in', self.init)
    kernel = param_with_axes(
      'kernel',
      lambda *args: base(*args) / jnp.sqrt(self.scale),
      shape,
      jnp.float32,
      axes=axes,
    )
    kernel, x = kernel.astype(self.dtype), x.astype(self.dtype)
    if not self.weights_left:
      return x @ kernel
    return weights_left_product(kernel, x)


def weights_left_product(kernel: Array, x: Array) -> Array:
  """`x @ kernel.T` for x [..., in], kernel [out, in], kernel on the left."""
  rows = x.reshape(-1, x.shape[-1])
  product = lax.dot_general(kernel, rows, (((1,), (1,)), ((), ())))
  product = lax.optimization_barrier(product)  # [out, rows]
  return product.T.reshape(*x.shape[:-1], kernel.shape[0])


class LayerNorm(nn.Module):
  """T5's layer norm: scale only, no mean, variance in float32."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    x = x.astype(jnp.float32)
    variance = jnp.mean(lax.square(x), axis=-1, keepdims=True)
    scale = param_with_axes(
      'scale',
      nn.initializers.ones,
      (x.shape[-1],),
      jnp.float32,
      axes=('embed',),
    )
    y = (x * lax.rsqrt(variance + 1e-6)).astype(self.dtype)
    return y * scale.astype(self.dtype)


class Embed(nn.Module):
  """Token embedding; `attend` is the tied output layer of T5 1.0."""

  config: T5Config

  def setup(self):
    self.embedding = param_with_axes(
      'embedding',
      nn.initializers.normal(stddev=1.0),
      (self.config.vocab_size, self.config.emb_dim),
      jnp.float32,
      axes=('vocab', 'embed'),
    )

  def __call__(self, tokens: Array) -> Array:
    x = jnp.take(self.embedding, tokens, axis=0, mode='clip')
    return x.astype(self.config.dtype)

  def attend(self, x: Array) -> Array:
    dtype = jnp.float32  # as T5X, for stable logits
    return weights_left_product(self.embedding.astype(dtype), x.astype(dtype))


class RelativeBias(nn.Module):
  """T5's learned attention bias by bucketed distance."""

  config: T5Config
  bidirectional: bool

  @nn.compact
  def __call__(self, query_position: Array, key_length: int) -> Array:
    """Bias of queries at positions [B, W] for keys 0..L-1: [B, H, W, L]."""
    table = param_with_axes(
      'rel_embedding',
      nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'),
      (self.config.num_heads, _NUM_BUCKETS),
      jnp.float32,
      axes=('heads', 'relpos_buckets'),
    )
    # All distances beyond the table fall in the last bucket of their side.
    buckets = relative_position_bucket(
      np.arange(-_MAX_DISTANCE, _MAX_DISTANCE + 1), self.bidirectional
    )
    distance = jnp.arange(key_length) - query_position[..., None]  # [B, W, L]
    distance = jnp.clip(distance, -_MAX_DISTANCE, _MAX_DISTANCE)
    by_distance = table.astype(self.config.dtype)[:, buckets]  # [H, 257]
    bias = jnp.take(by_distance, distance + _MAX_DISTANCE, axis=1)
    return jnp.moveaxis(bias, 0, 1)


class Attention(nn.Module):
  """Multi-head attention over keys and values given as arrays.

  Keys and values come from `keys_values` of the same module, so training,
  cross-attention and cached decoding share one product.
  """

  config: T5Config
  weights_left: bool = False

  def setup(self):
    cfg = self.config
    dense = functools.partial(
      Dense,
      cfg.num_heads * cfg.head_dim,
      ('embed', 'joined_kv'),
      dtype=cfg.dtype,
      init='normal',
      weights_left=self.weights_left,
    )
    # T5 folds the 1/sqrt(D) of the attention logits into this initializer.
    self.query = dense(scale=cfg.head_dim)
    self.key = dense()
    self.value = dense()
    self.out = Dense(
      cfg.emb_dim,
      ('joined_kv', 'embed'),
      dtype=cfg.dtype,
      init='normal',
      weights_left=self.weights_left,
    )

  def _split(self, x: Array) -> Array:
    """[B, W, H * D] -> [B * H, W, D]."""
    cfg = self.config
    batch, width, _ = x.shape
    x = x.reshape(batch, width, cfg.num_heads, cfg.head_dim)
    x = with_sharding_constraint(x, ('batch', 'length', 'heads', 'kv'))
    return x.swapaxes(1, 2).reshape(-1, width, cfg.head_dim)

  def keys_values(self, x: Array) -> tuple[Array, Array]:
    return self._split(self.key(x)), self._split(self.value(x))

  def __call__(
    self, x: Array, keys: Array, values: Array, bias: Array, dropout=None
  ) -> Array:
    """x [B, W, E], keys and values [B * H, L, D], bias [B, H or 1, W, L]."""
    cfg = self.config
    batch, width, _ = x.shape
    query = self._split(self.query(x))
    if cfg.float32_attention_logits:
      query, keys = query.astype(jnp.float32), keys.astype(jnp.float32)
    logits = jnp.einsum('nqd,nkd->nqk', query, keys)
    logits = logits.reshape(batch, cfg.num_heads, width, -1)
    weights = jax.nn.softmax(logits + bias.astype(logits.dtype))
    weights = weights.astype(cfg.dtype)
    if dropout is not None:
      weights = dropout(weights)
    weights = weights.reshape(batch * cfg.num_heads, width, -1)
    y = jnp.einsum('nqk,nkd->nqd', weights, values)
    y = y.reshape(batch, cfg.num_heads, width, cfg.head_dim).swapaxes(1, 2)
    return self.out(y.reshape(batch, width, -1))


class Mlp(nn.Module):
  """T5's feed-forward block; more than one activation means gated."""

  config: T5Config
  weights_left: bool = False

  @nn.compact
  def __call__(self, x: Array, deterministic: bool = True) -> Array:
    cfg = self.config
    dense = functools.partial(
      Dense, dtype=cfg.dtype, weights_left=self.weights_left
    )
    factors = []
    for i, name in enumerate(cfg.mlp_activations):
      suffix = '' if len(cfg.mlp_activations) == 1 else f'_{i}'
      y = dense(cfg.mlp_dim, ('embed', 'mlp'), name='wi' + suffix)(x)
      factors.append(y if name == 'linear' else getattr(nn, name)(y))
    y = functools.reduce(jnp.multiply, factors)
    y = nn.Dropout(cfg.dropout_rate, broadcast_dims=(-2,))(
      y, deterministic=deterministic
    )
    y = with_sharding_constraint(y, ('batch', 'length', 'mlp'))
    return dense(cfg.emb_dim, ('mlp', 'embed'), name='wo')(y)


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
    x = x + dropout(attention(y, *attention.keys_values(y), bias, dropout))
    y = LayerNorm(cfg.dtype, name='pre_mlp_layer_norm')(x)
    return x + dropout(Mlp(cfg, name='mlp')(y, deterministic))


class DecoderLayer(nn.Module):
  """Causal self-attention, cross-attention, feed-forward block."""

  config: T5Config
  weights_left: bool = False

  def setup(self):
    cfg = self.config
    self.pre_self_attention_layer_norm = LayerNorm(cfg.dtype)
    self.self_attention = Attention(cfg, self.weights_left)
    self.pre_cross_attention_layer_norm = LayerNorm(cfg.dtype)
    self.encoder_decoder_attention = Attention(cfg, self.weights_left)
    self.pre_mlp_layer_norm = LayerNorm(cfg.dtype)
    self.mlp = Mlp(cfg, self.weights_left)
    self.dropout = _dropout(cfg)

  def cross_keys_values(self, encoded: Array) -> tuple[Array, Array]:
    return self.encoder_decoder_attention.keys_values(encoded)

  def __call__(
    self, x: Array, cross, bias: Array, cross_bias: Array, cached, deterministic
  ):
    """One layer over x [B, W, E].

    Args:
      x: the chunk's activations.
      cross: keys and values of the inputs, each [B * H, I, D].
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
    keys_values = self.self_attention.keys_values(y)
    if cached is not None:
      keys, values, position = cached
      keys_values = (
        write_rows(keys, keys_values[0], position),
        write_rows(values, keys_values[1], position),
      )
    x = x + drop(self.self_attention(y, *keys_values, bias, drop))
    y = self.pre_cross_attention_layer_norm(x)
    x = x + drop(self.encoder_decoder_attention(y, *cross, cross_bias, drop))
    y = self.pre_mlp_layer_norm(x)
    return x + drop(self.mlp(y, deterministic)), keys_values


def write_rows(cache: Array, chunk: Array, position: Array) -> Array:
  """Overwrites cache [B * H, L, D] with chunk [B * H, W, D] from position [B].

  Entries that would fall outside 0..L-1 are dropped; nothing is shifted.
  """
  rows, width, _ = chunk.shape
  position = jnp.repeat(position, rows // position.shape[0])
  # A negative index would count from the end: send it past the end instead.
  position = jnp.where(position < 0, cache.shape[1], position)
  index = position[:, None] + jnp.arange(width)
  return cache.at[jnp.arange(rows)[:, None], index].set(
    chunk, mode='drop', unique_indices=True, indices_are_sorted=True
  )


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
  weights_left: bool = False

  def setup(self):
    cfg = self.config
    self.relpos_bias = RelativeBias(cfg, bidirectional=False)
    self.layers = [
      DecoderLayer(cfg, self.weights_left)
      for _ in range(cfg.num_decoder_layers)
    ]
    self.decoder_norm = LayerNorm(cfg.dtype)
    self.dropout = _dropout(cfg)
    if not cfg.logits_via_embedding:
      self.logits_dense = Dense(
        cfg.vocab_size, ('embed', 'vocab'), weights_left=self.weights_left
      )

  def cross_keys_values(self, encoded: Array):
    return [layer.cross_keys_values(encoded) for layer in self.layers]

  def __call__(
    self, tokens, cross, mask, cross_bias, position, cached, deterministic=True
  ):
    """Hidden states [B, W, E] of tokens [B, W]; see `DecoderLayer`.

    `mask` [B or 1, W, L] is True where a query may see a key, and `cached` is
    None or one (keys, values) per layer.
    """
    drop = functools.partial(self.dropout, deterministic=deterministic)
    length = mask.shape[-1]
    query_position = position[:, None] + jnp.arange(tokens.shape[1])
    bias = self.relpos_bias(query_position, length)
    bias = jnp.where(mask[:, None], bias, jnp.asarray(_MASKED, bias.dtype))
    x = drop(self.token_embedder(tokens))
    x = with_sharding_constraint(x, ('batch', 'length', 'embed'))
    written = []
    for i, layer in enumerate(self.layers):
      entry = None if cached is None else (*cached[i], position)
      x, keys_values = layer(
        x, cross[i], bias, cross_bias, entry, deterministic
      )
      written.append(keys_values)
    return drop(self.decoder_norm(x)), written

  def logits(self, hidden: Array) -> Array:
    cfg = self.config
    if not cfg.logits_via_embedding:
      return self.logits_dense(hidden)
    # The tied output layer of 1.0 is scaled; the untied one of 1.1 is not.
    return self.token_embedder.attend(hidden) / jnp.sqrt(cfg.emb_dim)


class Transformer(nn.Module):
  """An encoder-decoder T5.

  `__call__` and `encode` have the signatures that T5X's `EncoderDecoderModel`
  calls. `start`, `extend` and `logits` are the cached decoder.

  Attributes:
    config: the sizes; T5X's own `network.T5Config` will do.
    weights_left: the decoder's kernels are stored as `decoding_layout` leaves
      them: faster for chunks on a CPU, see `Dense`.
  """

  config: T5Config
  weights_left: bool = False

  def setup(self):
    self.token_embedder = Embed(self.config)
    self.encoder = Encoder(self.config, self.token_embedder)
    self.decoder = Decoder(self.config, self.token_embedder, self.weights_left)

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

  def start(self, encoder_input_tokens: Array, capacity: int) -> Cache:
    """Encodes the inputs and allocates room for `capacity` tokens per row."""
    cfg = self.config
    encoded = self.encode(encoder_input_tokens, enable_dropout=False)
    cross = self.decoder.cross_keys_values(encoded)
    rows = encoder_input_tokens.shape[0] * cfg.num_heads
    empty = lambda: tuple(
      jnp.zeros((rows, capacity, cfg.head_dim), cfg.dtype) for _ in cross
    )
    return Cache(
      keys=empty(),
      values=empty(),
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
    length = cache.keys[0].shape[1]
    query_position = position[:, None] + jnp.arange(tokens.shape[1])
    mask = jnp.arange(length) <= query_position[..., None]
    hidden, written = self.decoder(
      tokens,
      list(zip(cache.cross_keys, cache.cross_values)),
      mask,
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


def initial_params(config: T5Config, seed: int) -> Any:
  """Fresh parameters, the values that T5X draws from the same key."""
  tokens = jnp.ones((1, 2), jnp.int32)
  init = lambda key: Transformer(config).init(
    key, tokens, tokens, enable_dropout=False
  )
  return jax.jit(init)(jax.random.key(seed))['params']


def decoding_layout(params: Any, dtype: Any = None) -> Any:
  """Parameters as `Transformer(config, weights_left=True)` takes them.

  Transposes the decoder's kernels. Call it once, outside the decoding loop.
  """

  def leaf(path, x):
    names = [str(getattr(k, 'key', k)) for k in path]
    if dtype is not None:
      x = x.astype(dtype)
    if names[0] == 'decoder' and names[-1] == 'kernel':
      return x.T
    return x

  return jax.tree_util.tree_map_with_path(leaf, params)


@functools.cache
def language_model(
  config: T5Config, vocab_size: int | None = None, weights_left: bool = False
) -> LanguageModel:
  """A T5 as the decoding loops want it; inputs are token ids [B, I].

  The same arguments give the same object, so nothing compiles twice.

  Args:
    config: the sizes.
    vocab_size: number of real ids; default all of them.
    weights_left: keep the decoder's kernels in the layout that makes chunks
      fast on a CPU. Pays for targets, not for small drafts.
  """
  module = Transformer(config, weights_left)
  call = lambda method: (
    lambda params, *args: module.apply({'params': params}, *args, method=method)
  )
  return LanguageModel(
    start=call('start'),
    extend=call('extend'),
    logits=call('logits'),
    vocab_size=vocab_size or config.vocab_size,
    prepare=decoding_layout if weights_left else lambda params: params,
  )
