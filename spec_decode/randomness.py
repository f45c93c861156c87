# SPDX-License-Identifier: Apache-2.0
"""Keys that belong to rows, so that batching cannot change a sample.

A row's key comes from (seed, example id), or from a hash of its inputs where
examples have no ids. Each block of a row folds in where it starts and which
block of the row it is, then the role of the draw. No key is used for two roles:
that would bias the output.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

GUESS = 0
TEST = 1
EXTRA = 2


def row_keys(seed: int, example_ids: Array) -> Array:
  """One key per row from a seed and uint32 example ids [B]."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return fold(jax.random.key(seed), jnp.asarray(example_ids, jnp.uint32))


def hash_ids(tokens: Array) -> Array:
  """A uint32 of each row of token ids [B, I], for rows without another name.

  Id 0 is padding: however long a row is padded, its hash is the same.
  """

  def mix(x):  # the finalizer of MurmurHash3
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

  place = mix(jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.uint32))
  terms = mix(tokens.astype(jnp.uint32) + place)
  terms = jnp.where(tokens == 0, jnp.uint32(0), terms)
  return mix(jnp.sum(terms, axis=1, dtype=jnp.uint32))


def block_keys(keys: Array, position: Array, iteration: Array) -> Array:
  """Keys [B] of the blocks that start at position [B] in iteration [B]."""
  fold = jax.vmap(jax.random.fold_in)
  return fold(fold(keys, position), iteration)


def with_role(keys: Array, role: int) -> Array:
  """Keys [B] for one role."""
  return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, role)


def uniforms(keys: Array, *shape: int) -> Array:
  """Uniform numbers in [0, 1), float32 [B, *shape], own ones for each row."""
  return jax.vmap(lambda key: jax.random.uniform(key, shape))(keys)
