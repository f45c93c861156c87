# SPDX-License-Identifier: Apache-2.0
"""Building blocks of T5 in Flax, with T5X's names, shapes and logical axes.

Shape letters: B batch, W chunk width, L key length, H heads, D head size,
E embedding size, V (padded) vocabulary.
"""

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

Array = jax.Array

_NUM_BUCKETS = 32
_MAX_DISTANCE = 128
# Sizes of kernels by which `few_rows_product` chooses, measured on two cores:
# from this many inputs on a kernel stands on the left of several rows,
_MANY_INPUTS = 384
# and from this many on of a single row too;
_MANY_INPUTS_FOR_ONE = 768
# with fewer, a kernel with this many outputs is left to the library.
_MANY_OUTPUTS = 2048


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
  mlp_activations: tuple[str, ...] = struct.field(
    pytree_node=False, default=('relu',)
  )
  dropout_rate: float = struct.field(pytree_node=False, default=0.0)
  logits_via_embedding: bool = struct.field(pytree_node=False, default=False)
  float32_attention_logits: bool = struct.field(
    pytree_node=False, default=False
  )

  def check_length(self, length: int) -> None:
    """Raises ValueError for texts longer than positions are known for."""


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

  With `few_rows` the product is `few_rows_product`, and the kernel is stored as
  `few_rows_kernel` returns it.
  """

  features: int
  kernel_axes: tuple[str, str]
  dtype: Any = jnp.float32
  scale: float = 1.0
  init: str = 'truncated_normal'
  few_rows: bool = False

  @nn.compact
  def __call__(self, x: Array) -> Array:
    base = nn.initializers.variance_scaling(1.0, 'fan_in', self.init)
    stored = few_rows_kernel if self.few_rows else lambda kernel: kernel
    turned = self.few_rows and _turned(x.shape[-1])
    kernel = param_with_axes(
      'kernel',
      lambda *args: stored(base(*args) / jnp.sqrt(self.scale)),
      (x.shape[-1], self.features),
      jnp.float32,
      axes=self.kernel_axes[::-1] if turned else self.kernel_axes,
    )
    kernel, x = kernel.astype(self.dtype), x.astype(self.dtype)
    return few_rows_product(x, kernel) if self.few_rows else x @ kernel


def _turned(inputs: int) -> bool:
  """Whether `few_rows_kernel` returns [out, in]."""
  return inputs >= _MANY_INPUTS


def few_rows_kernel(kernel: Array) -> Array:
  """A checkpoint's kernel [in, out] as `few_rows_product` takes it."""
  return kernel.T if _turned(kernel.shape[0]) else kernel


def few_rows_product(x: Array, kernel: Array) -> Array:
  """The product of x [..., in] of few rows, such as the chunks of a decoder.

  On a CPU XLA leaves a product of several rows to a library that packs the
  right-hand side anew in every call. So a kernel with many inputs stands on the
  left, where the library reads it row by row. With few inputs its rows are too
  short for that: the activations stand transposed instead, and XLA keeps the
  product to itself, unless there are outputs enough for the library to be
  faster all the same. The barriers keep XLA from folding transpositions back.

  Args:
    x: activations.
    kernel: of `few_rows_kernel`, [out, in] for many inputs or [in, out].

  Returns:
    [..., out].
  """
  inputs, turned = x.shape[-1], _turned(x.shape[-1])
  rows = x.reshape(-1, inputs)
  ordinary = lambda rows, kernel: rows @ (kernel.T if turned else kernel)
  # For one row nothing is packed.
  if turned:
    special = len(rows) > 1 or inputs >= _MANY_INPUTS_FOR_ONE
  else:
    special = len(rows) > 1 and kernel.shape[1] < _MANY_OUTPUTS
  if special:
    cpu = _kernel_first if turned else _rows_transposed
    product = lax.platform_dependent(rows, kernel, cpu=cpu, default=ordinary)
  else:
    product = ordinary(rows, kernel)
  return product.reshape(*x.shape[:-1], -1)


def _kernel_first(rows: Array, kernel: Array) -> Array:
  count = len(rows)
  if count > 4:
    # The library takes four or eight rows at once; the rest one by one.
    rows = jnp.pad(rows, ((0, -count % 8), (0, 0)))
  product = lax.dot_general(kernel, rows, (((1,), (1,)), ((), ())))
  return lax.optimization_barrier(product).T[:count]


def _rows_transposed(rows: Array, kernel: Array) -> Array:
  columns = lax.optimization_barrier(rows.T)
  return lax.dot_general(columns, kernel, (((0,), (0,)), ((), ())))


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
    # T5X's evaluation initialises with ids of float32.
    tokens = tokens.astype(jnp.int32)
    x = jnp.take(self.embedding, tokens, axis=0, mode='clip')
    return x.astype(self.config.dtype)

  def attend(self, x: Array) -> Array:
    dtype = jnp.float32  # as T5X, for stable logits
    return x.astype(dtype) @ self.embedding.astype(dtype).T


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

  Training, cross-attention and cached decoding share one product: project
  with `queries`, `keys_values` or all at once, then call with the results.

  Attributes:
    config: the sizes.
    few_rows: see `Dense`.
    fused: one kernel projects queries, keys and values of the same
      activations.
  """

  config: T5Config
  few_rows: bool = False
  fused: bool = False

  def setup(self):
    cfg = self.config
    features, axes = cfg.num_heads * cfg.head_dim, ('embed', 'joined_kv')
    dense = functools.partial(
      Dense, dtype=cfg.dtype, init='normal', few_rows=self.few_rows
    )
    if self.fused:
      self.query_key_value = dense(3 * features, axes)
    else:
      # T5 folds the 1/sqrt(D) of the attention logits into this initializer.
      self.query = dense(features, axes, scale=cfg.head_dim)
      self.key = dense(features, axes)
      self.value = dense(features, axes)
    self.out = dense(cfg.emb_dim, axes[::-1])

  def _split(self, x: Array) -> Array:
    """[B, W, H * D] -> [B * H, W, D]."""
    cfg = self.config
    batch, width, _ = x.shape
    x = x.reshape(batch, width, cfg.num_heads, cfg.head_dim)
    x = with_sharding_constraint(x, ('batch', 'length', 'heads', 'kv'))
    return x.swapaxes(1, 2).reshape(-1, width, cfg.head_dim)

  def queries(self, x: Array) -> Array:
    return self._split(self.query(x))

  def keys_values(self, x: Array) -> tuple[Array, Array]:
    """Keys [B * H, D, W], as the product with queries reads them, and values.

    Values are [B * H, W, D].
    """
    return self._split(self.key(x)).mT, self._split(self.value(x))

  def queries_keys_values(self, x: Array) -> tuple[Array, Array, Array]:
    if not self.fused:
      return self.queries(x), *self.keys_values(x)
    projected = jnp.split(self.query_key_value(x), 3, -1)
    queries, keys, values = map(self._split, projected)
    return queries, keys.mT, values

  def __call__(
    self, queries: Array, keys: Array, values: Array, bias: Array, dropout=None
  ) -> Array:
    """Attends.

    Args:
      queries: [B * H, W, D].
      keys: [B * H, D, L].
      values: [B * H, L, D].
      bias: [B or 1, H or 1, W, L], added to the logits.
      dropout: of the attention weights, if any.

    Returns:
      [B, W, E].
    """
    cfg = self.config
    width = queries.shape[1]
    if cfg.float32_attention_logits:
      queries, keys = queries.astype(jnp.float32), keys.astype(jnp.float32)
    logits = jnp.einsum('nqd,ndk->nqk', queries, keys)
    logits = logits.reshape(-1, cfg.num_heads, *logits.shape[1:])
    weights = jax.nn.softmax(logits + bias.astype(logits.dtype))
    weights = weights.astype(cfg.dtype)
    if dropout is not None:
      weights = dropout(weights)
    weights = weights.reshape(-1, *weights.shape[2:])
    y = jnp.einsum('nqk,nkd->nqd', weights, values)
    y = y.reshape(-1, cfg.num_heads, width, cfg.head_dim).swapaxes(1, 2)
    return self.out(y.reshape(y.shape[0], width, -1))


class Mlp(nn.Module):
  """T5's feed-forward block; more than one activation means gated.

  With `fused` the input kernels are one, and products are of few rows.
  """

  config: T5Config
  fused: bool = False

  @nn.compact
  def __call__(self, x: Array, deterministic: bool = True) -> Array:
    cfg = self.config
    dense = functools.partial(Dense, dtype=cfg.dtype, few_rows=self.fused)
    count, axes = len(cfg.mlp_activations), ('embed', 'mlp')
    if self.fused:
      parts = jnp.split(
        dense(count * cfg.mlp_dim, axes, name='wi')(x), count, -1
      )
    else:
      names = ['wi'] if count == 1 else [f'wi_{i}' for i in range(count)]
      parts = [dense(cfg.mlp_dim, axes, name=name)(x) for name in names]
    y = functools.reduce(
      jnp.multiply,
      [
        part if name == 'linear' else getattr(nn, name)(part)
        for name, part in zip(cfg.mlp_activations, parts)
      ],
    )
    y = nn.Dropout(cfg.dropout_rate, broadcast_dims=(-2,))(
      y, deterministic=deterministic
    )
    y = with_sharding_constraint(y, ('batch', 'length', 'mlp'))
    return dense(cfg.emb_dim, axes[::-1], name='wo')(y)
