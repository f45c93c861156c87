# SPDX-License-Identifier: Apache-2.0
"""Keys belong to rows, and no two draws share one."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from spec_decode import randomness

ROLES = randomness.GUESS, randomness.TEST, randomness.EXTRA


def bits(keys):
  return [tuple(row) for row in np.asarray(jax.random.key_data(keys))]


def test_a_key_depends_on_seed_and_example_only():
  ids = np.array([5, 0, 7, 2**32 - 1, 6], np.uint32)
  keys = bits(randomness.row_keys(3, ids))
  assert len(set(keys)) == len(ids)
  order = np.array([4, 1, 0, 3, 2])
  assert bits(randomness.row_keys(3, ids[order])) == [keys[i] for i in order]
  for i in range(len(ids)):
    assert bits(randomness.row_keys(3, ids[i : i + 1])) == [keys[i]]
  assert not set(bits(randomness.row_keys(4, ids))) & set(keys)
  assert bits(randomness.row_keys(3, ids.tolist())) == keys


def test_every_place_block_and_role_has_its_own_key():
  rows = randomness.row_keys(0, jnp.arange(3))
  seen = set(bits(rows))
  for position in range(6):
    for iteration in range(6):
      place = np.full(3, position), np.full(3, iteration)
      keys = randomness.block_keys(rows, *place)
      new = bits(keys)
      for role in ROLES:
        new += bits(randomness.with_role(keys, role))
      assert not seen & set(new)
      seen |= set(new)
  assert len(seen) == 3 + 36 * 3 * (1 + len(ROLES))


def test_rows_may_stand_at_different_places():
  rows = randomness.row_keys(0, jnp.arange(3))
  position, iteration = np.array([4, 9, 1]), np.array([2, 0, 5])
  keys = bits(randomness.block_keys(rows, position, iteration))
  for i in range(3):
    one = slice(i, i + 1)
    alone = randomness.block_keys(rows[one], position[one], iteration[one])
    assert bits(alone) == [keys[i]]


def test_uniforms_are_the_row_s_own():
  keys = randomness.row_keys(1, jnp.arange(5))
  together = np.asarray(randomness.uniforms(keys, 3, 2))
  assert together.shape == (5, 3, 2) and together.dtype == np.float32
  for i in range(5):
    alone = randomness.uniforms(keys[i : i + 1], 3, 2)
    np.testing.assert_array_equal(alone[0], together[i])


def test_uniforms_are_uniform_and_roles_independent():
  n = 100_000
  rows = randomness.row_keys(2, jnp.arange(n))
  keys = randomness.block_keys(rows, jnp.arange(n) % 7, jnp.arange(n) % 5)
  columns = [
    np.asarray(randomness.uniforms(randomness.with_role(keys, role), 2))
    for role in ROLES[:3]
  ]
  columns = np.concatenate(columns, axis=1).T
  assert (columns >= 0).all() and (columns < 1).all()
  for column in columns:
    assert stats.kstest(column, 'uniform').pvalue > 1e-4
  # Independent columns have a correlation of standard error 1 / sqrt(n), and
  # so have neighbouring rows.
  correlation = np.corrcoef(columns) - np.eye(len(columns))
  assert np.abs(correlation).max() < 5 / np.sqrt(n)
  for column in columns:
    neighbours = np.corrcoef(column[1:], column[:-1])[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(n)


def test_a_hash_is_of_the_ids_and_their_order_alone():
  rng = np.random.default_rng(0)
  rows = rng.integers(1, 32_000, (20_000, 6)).astype(np.int32)
  rows[::2, 4:] = 0
  hashes = np.asarray(randomness.hash_ids(rows))
  assert hashes.dtype == np.uint32
  padded = np.pad(rows, ((0, 0), (0, 9)))
  np.testing.assert_array_equal(randomness.hash_ids(padded), hashes)
  # 20,000 of 2^32: a coincidence is expected 0.05 times.
  assert len(set(hashes.tolist())) == len(rows)
  turned = rows[1::2, ::-1]
  assert not np.any(randomness.hash_ids(turned) == hashes[1::2])
  assert stats.kstest(hashes / 2**32, 'uniform').pvalue > 1e-4
