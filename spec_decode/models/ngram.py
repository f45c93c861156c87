# SPDX-License-Identifier: Apache-2.0
"""N-gram tables: counting, smoothing, looking up, one file (section 3.6).

Interpolated absolute discounting (Ney, Essen and Kneser 1994; section 2.7 of
Chen and Goodman 1999), cut off after the K most frequent successors. With
c(.) the counts, D the discount, h a context and h' = h without its oldest id:

  q(x | h) = (c(h x) - D) / c(h) [x in top_K(h)] + rest(h) q(x | h')
  q(x)     = max(c(x) - D, 0) / N + rest / V
  rest(h)  = 1 - sum of the first term

Contexts that were never counted fall back: q(x | h) = q(x | h'). So tables are
sparse, every distribution sums to one, and no id has probability zero.

Shape letters: M ids of the longest context, V ids, C contexts of one length, R
(context, successor) pairs, K successors of a context at most.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import json
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from spec_decode.models import files
from spec_decode.models.files import Path

Array = jax.Array
Tables = dict[str, Any]

# Stands where a context reaches back beyond the first token; never an id.
NONE = -1
_FORMAT = 'spec_decode n-gram 1'


def count(
  sequences: Iterable[Sequence[int]],
  vocab_size: int,
  order: int,
  successors: int = 32,
  discount: float = 0.75,
  max_contexts: int | None = None,
  start_id: int = 0,
) -> Tables:
  """Counts ids of text into tables.

  Args:
    sequences: ids of each text, its EOS included, without padding.
    vocab_size: V, the number of real ids.
    order: 1 for unigrams, 2 for bigrams, ...; the longest context is one less.
    successors: K.
    discount: D, in (0, 1): what every pair that was seen gives away.
    max_contexts: keep the most frequent contexts of each length; None for all.
    start_id: stands before each text, as a context only; T5's is 0.

  Returns:
    The parameters of `probabilities`, a dict of NumPy arrays:
    unigram: float32 [V], q(x).
    order_2, order_3, ...: a dict for contexts of 1, 2, ... ids:
      contexts: int32 [C, 1 or 2 ...], in lexicographic order, oldest id first.
      starts: int32 [C + 1], where each context's pairs begin and end.
      ids: int32 [R], successors, the most frequent first.
      probs: float32 [R], (c(h x) - D) / c(h).
      rest: float32 [C], rest(h).
      slots: int32 [K], 0 to K - 1.

  Raises:
    ValueError: an argument or an id is out of range, or no text is as long as
      a context.
  """
  for name, good, expected, got in (
    ('order', order >= 1, 'at least 1', order),
    ('successors', successors >= 1, 'at least 1', successors),
    ('discount', 0 < discount < 1, 'in (0, 1)', discount),
  ):
    if not good:
      raise ValueError(f'Expected {name} to be {expected}, got {got}.')
  stream, place = _stream(sequences, vocab_size, start_id)
  tables = {'unigram': _unigram(stream[place > 0], vocab_size, discount)}
  for length in range(1, order):
    windows = np.lib.stride_tricks.sliding_window_view(stream, length + 1)
    # The successor must have that many ids of its own text before it.
    windows = windows[place[length:] >= length]
    if not len(windows):
      raise ValueError(
        f'Expected texts of at least {length} ids for order {length + 1}, got'
        ' none. Lower the order.'
      )
    tables[f'order_{length + 1}'] = _level(
      windows, vocab_size, successors, discount, max_contexts
    )
  return tables


def _stream(sequences, vocab_size, start_id) -> tuple[np.ndarray, np.ndarray]:
  """All texts in one row, and each id's place in its text (0: the start)."""
  texts = [np.asarray([start_id, *ids], np.int64) for ids in sequences]
  stream = np.concatenate([*texts, np.zeros((0,), np.int64)])
  if len(stream) == len(texts):
    raise ValueError('Expected at least one id to count, got none.')
  if stream.min() < 0 or stream.max() >= vocab_size:
    raise ValueError(
      f'Expected ids in 0..{vocab_size - 1}, got {stream.min()} to'
      f' {stream.max()}. Count with the vocabulary that made the ids.'
    )
  place = np.concatenate([np.arange(len(text)) for text in texts])
  return stream, place


def _unigram(ids: np.ndarray, vocab_size: int, discount: float) -> np.ndarray:
  counts = np.bincount(ids, minlength=vocab_size)
  kept = np.maximum(counts - discount, 0.0) / len(ids)
  return (kept + (1.0 - kept.sum()) / vocab_size).astype(np.float32)


def _level(
  windows, vocab_size, successors, discount, max_contexts
) -> dict[str, np.ndarray]:
  """Tables of one context length from windows [N, context and successor]."""
  contexts, rank, totals = _ranks(windows[:, :-1], vocab_size)
  if max_contexts is not None and max_contexts < len(contexts):
    kept = np.sort(np.argsort(-totals, kind='stable')[:max_contexts])
    renumber = np.full(len(contexts), -1)
    renumber[kept] = np.arange(len(kept))
    real = renumber[rank] >= 0
    windows, rank = windows[real], renumber[rank[real]]
    contexts, totals = contexts[kept], totals[kept]
  pairs, counts = np.unique(
    rank * vocab_size + windows[:, -1], return_counts=True
  )
  owner, ids = np.divmod(pairs, vocab_size)
  order = np.lexsort((ids, -counts, owner))  # equal counts: lowest id first
  owner, ids, counts = owner[order], ids[order], counts[order]
  first = np.searchsorted(owner, np.arange(len(contexts)))
  kept = np.arange(len(owner)) - first[owner] < successors
  owner, ids, counts = owner[kept], ids[kept], counts[kept]
  probs = (counts - discount) / totals[owner]
  rest = 1.0 - np.bincount(owner, probs, minlength=len(contexts))
  starts = np.searchsorted(owner, np.arange(len(contexts) + 1))
  return {
    'contexts': contexts.astype(np.int32),
    'starts': starts.astype(np.int32),
    'ids': ids.astype(np.int32),
    'probs': probs.astype(np.float32),
    'rest': rest.astype(np.float32),
    'slots': np.arange(successors, dtype=np.int32),
  }


def _ranks(rows: np.ndarray, base: int):
  """Distinct rows in lexicographic order, each row's rank, and counts."""
  rank = np.zeros(len(rows), np.int64)
  for column in rows.T:
    # One column more at a time keeps the keys within 64 bits.
    _, first, rank, counts = np.unique(
      rank * base + column,
      return_index=True,
      return_inverse=True,
      return_counts=True,
    )
  return rows[first], rank, counts


def context_length(tables: Tables) -> int:
  """M: how many ids the tables look back."""
  return sum(name.startswith('order_') for name in tables)


def probabilities(tables: Tables, context: Array) -> Array:
  """q(. | context) as the module's docstring defines it.

  Args:
    tables: from `count` or `load`.
    context: int32 [..., M or more], the newest id last; `NONE` where there is
      none.

  Returns:
    float32 [..., V], summing to one.
  """
  *leading, width = context.shape
  context = context.reshape(math.prod(leading), width)
  rows = jnp.arange(context.shape[0])[:, None]
  unigram = jnp.asarray(tables['unigram'])
  q = jnp.broadcast_to(unigram, (context.shape[0], *unigram.shape))
  for length in range(1, context_length(tables) + 1):
    level = jax.tree.map(jnp.asarray, tables[f'order_{length + 1}'])
    h, found = _find(level['contexts'], context[:, -length:])
    index = level['starts'][h][:, None] + level['slots']
    real = found[:, None] & (index < level['starts'][h + 1][:, None])
    ids = level['ids'].at[index].get(mode='clip')
    probs = level['probs'].at[index].get(mode='clip')
    q = q * jnp.where(found, level['rest'][h], 1.0)[:, None]
    q = q.at[rows, ids].add(jnp.where(real, probs, 0.0))
  return q.reshape(*leading, q.shape[-1])


def _find(contexts: Array, wanted: Array) -> tuple[Array, Array]:
  """Row of each wanted [B, L] in sorted contexts [C, L], and whether it is."""
  size, length = contexts.shape
  # The sign of the first difference outweighs all that follow.
  weights = 2 ** jnp.arange(length)[::-1]

  def halve(_, bounds):
    low, high = bounds
    middle = (low + high) // 2
    order = jnp.sum(jnp.sign(contexts[middle] - wanted) * weights, axis=-1)
    below = (order < 0) & (low < high)
    return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

  low = jnp.zeros(wanted.shape[0], jnp.int32)
  bounds = low, jnp.full_like(low, size - 1)
  low, _ = lax.fori_loop(0, size.bit_length(), halve, bounds)
  return low, jnp.all(contexts[low] == wanted, axis=-1)


def most_frequent(tables: Tables, size: int) -> tuple[int, ...]:
  """The `size` most frequent ids, in ascending order; the lowest of equals."""
  order = np.argsort(-np.asarray(tables['unigram']), kind='stable')
  if not 0 < size <= len(order):
    raise ValueError(
      f'Expected 1 to {len(order)} of the ids that were counted, got {size}.'
    )
  return tuple(sorted(order[:size].tolist()))


def save(path: Path, tables: Tables, metadata: Any = None) -> None:
  """Writes one safetensors file, by renaming a complete one.

  Args:
    path: of the file, *.safetensors.
    tables: from `count`.
    metadata: what JSON can say, for `load_metadata`: where the text came from
      and which vocabulary made the ids.
  """
  path = files.absolute(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  flat = {'unigram': tables['unigram']}
  for length in range(1, context_length(tables) + 1):
    name = f'order_{length + 1}'
    flat |= {f'{name}/{key}': x for key, x in tables[name].items()}
  flat = {key: np.ascontiguousarray(x) for key, x in flat.items()}
  header = {'format': _FORMAT, 'json': json.dumps(metadata)}
  unfinished = path.parent / f'{path.name}.unfinished'
  unfinished.write_bytes(safetensors.numpy.save(flat, header))
  unfinished.replace(path)


def load(path: Path) -> Tables:
  """Tables that `save` wrote.

  Raises:
    FileNotFoundError: no such file.
    ValueError: not a file of `save`.
  """
  tables = {}
  with _open(path) as file:
    for key in file.keys():
      name, _, part = key.partition('/')
      if part:
        tables.setdefault(name, {})[part] = file.get_tensor(key)
      else:
        tables[name] = file.get_tensor(key)
  return tables


def load_metadata(path: Path) -> Any:
  """What `save` was given as metadata; errors as `load`."""
  with _open(path) as file:
    return json.loads(file.metadata()['json'])


def counted_with(path: Path) -> str | None:
  """Fingerprint of the vocabulary of tables, if the file names it."""
  return (load_metadata(path) or {}).get('vocabulary')


def _open(path: Path):
  path = files.absolute(path)
  if not path.is_file():
    raise FileNotFoundError(
      f'Expected n-gram tables at {path}, found no file. `ngram.count` and'
      ' `ngram.save` make one.'
    )
  file = files.open_safetensors(path)
  if (file.metadata() or {}).get('format') != _FORMAT:
    raise ValueError(
      f'Expected n-gram tables in {path}, got another kind of file. Model'
      ' weights are read by `checkpoints.load`.'
    )
  return file
