# SPDX-License-Identifier: Apache-2.0
"""A decoder's keys and values: how they are stored, written and seen.

Heads are folded into the batch axis and keys stand transposed, because that is
how the attention products read them: XLA then updates the arrays in place
inside a loop.

Shape letters: B batch, W chunk width, L cache length, H heads, D head size.
"""

import jax
import jax.numpy as jnp

from spec_decode.models.layers import T5Config

Array = jax.Array


def empty(
  config: T5Config, batch: int, capacity: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
  """Keys [B * H, D, L] and values [B * H, L, D] of no tokens, one per layer.

  Room is made in eights, which vector units read without a remainder.
  """
  rows, length = batch * config.num_heads, -(-capacity // 8) * 8
  zeros = lambda *shape: tuple(
    jnp.zeros((rows, *shape), config.dtype)
    for _ in range(config.num_decoder_layers)
  )
  return zeros(config.head_dim, length), zeros(length, config.head_dim)


def causal_mask(position: Array, width: int, length: int) -> Array:
  """True where queries at position[b] + 0..W-1 may see a key: [B, W, L]."""
  query_position = position[:, None] + jnp.arange(width)
  return jnp.arange(length) <= query_position[..., None]


def write(
  keys: Array, values: Array, chunk: tuple[Array, Array], position: Array
) -> tuple[Array, Array]:
  """Overwrites cached keys and values with those of a chunk.

  Entries that would fall outside 0..L-1 are dropped; nothing is shifted.

  Args:
    keys: [B * H, D, L].
    values: [B * H, L, D].
    chunk: keys [B * H, D, W] and values [B * H, W, D].
    position: [B], of the chunk's first entry.
  """
  new_keys, new_values = chunk
  rows, width, _ = new_values.shape
  length = values.shape[1]
  position = jnp.repeat(position, rows // position.shape[0])
  # A negative index would count from the end: send it past the end instead.
  position = jnp.where(position < 0, length, position)
  index = position[:, None] + jnp.arange(width)
  if rows * width == 1:
    # XLA copies the cache to write one entry, but not for two: the second
    # falls outside.
    index = jnp.concatenate([index, jnp.maximum(index, length) + 1], axis=1)
    new_keys = jnp.repeat(new_keys, 2, axis=2)
    new_values = jnp.repeat(new_values, 2, axis=1)
  row = jnp.arange(rows)[:, None]
  rules = dict(mode='drop', unique_indices=True, indices_are_sorted=True)
  return (
    keys.at[row, :, index].set(new_keys.mT, **rules),
    values.at[row, index].set(new_values, **rules),
  )
