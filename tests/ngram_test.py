# SPDX-License-Identifier: Apache-2.0
"""N-gram tables against hand-made numbers and a dictionary of counts."""

import collections
import itertools

from etils.epath import gpath
from etils.epath import testing as epath_testing
import jax
import numpy as np
import pytest

from spec_decode.models import ngram

# Ids of three texts: 9 to predict, of them 1 and 2 three times each, 3 twice.
TEXTS = [[2, 3, 1], [2, 3, 1], [2, 4, 1]]
# With D = 1/2 each of the 4 ids that occur gives 1/18 away: 2/9 in all.
UNIGRAM = np.array([2, 14.5, 14.5, 9.5, 4.5]) / 45


def at(tables, *context):
  return np.asarray(ngram.probabilities(tables, np.array(context, np.int32)))


def test_unigrams_by_hand():
  tables = ngram.count(TEXTS, vocab_size=5, order=1, discount=0.5)
  assert ngram.context_length(tables) == 0
  np.testing.assert_allclose(at(tables), UNIGRAM, rtol=1e-6)
  np.testing.assert_allclose(at(tables, 3), UNIGRAM, rtol=1e-6)


def test_bigrams_by_hand():
  tables = ngram.count(TEXTS, vocab_size=5, order=2, discount=0.5)
  # After 2: 3 twice and 4 once.
  expected = np.array([0, 0, 0, 1.5, 0.5]) / 3 + 1 / 3 * UNIGRAM
  np.testing.assert_allclose(at(tables, 2), expected, rtol=1e-6)
  # A text starts after id 0, always with 2.
  expected = np.array([0, 0, 2.5, 0, 0]) / 3 + 0.5 / 3 * UNIGRAM
  np.testing.assert_allclose(at(tables, 0), expected, rtol=1e-6)
  # Nothing follows EOS, and nothing stands before the first token.
  np.testing.assert_allclose(at(tables, 1), UNIGRAM, rtol=1e-6)
  np.testing.assert_allclose(at(tables, ngram.NONE), UNIGRAM, rtol=1e-6)


def test_successors_beyond_the_most_frequent_share_the_unigram():
  tables = ngram.count(TEXTS, vocab_size=5, order=2, successors=1, discount=0.5)
  expected = np.array([0, 0, 0, 1.5, 0]) / 3 + 1.5 / 3 * UNIGRAM
  np.testing.assert_allclose(at(tables, 2), expected, rtol=1e-6)


def test_longer_contexts_back_off_by_hand():
  tables = ngram.count(TEXTS, vocab_size=5, order=3, discount=0.5)
  eos = np.array([0, 1, 0, 0, 0])
  after_3 = 0.75 * eos + 0.25 * UNIGRAM
  np.testing.assert_allclose(
    at(tables, 2, 3), 0.75 * eos + 0.25 * after_3, rtol=1e-6
  )
  np.testing.assert_allclose(at(tables, 4, 3), after_3, rtol=1e-6)
  np.testing.assert_allclose(at(tables, ngram.NONE, 3), after_3, rtol=1e-6)
  np.testing.assert_allclose(at(tables, 3, ngram.NONE), UNIGRAM, rtol=1e-6)


def reference(texts, vocab_size, order, successors, discount, context):
  """q(. | context) from dictionaries, straight from the formula."""
  ids = collections.Counter(i for text in texts for i in text)
  total = sum(ids.values())
  q = np.array([max(ids[i] - discount, 0) / total for i in range(vocab_size)])
  q += (1 - q.sum()) / vocab_size
  for length in range(1, order):
    followers = collections.Counter()
    for text in texts:
      text = [0, *text]
      for i in range(length, len(text)):
        if tuple(text[i - length : i]) == tuple(context[-length:]):
          followers[text[i]] += 1
    if followers:
      best = sorted(followers, key=lambda i: (-followers[i], i))[:successors]
      seen = sum(followers.values())
      first = np.zeros(vocab_size)
      first[best] = [(followers[i] - discount) / seen for i in best]
      q = first + (1 - first.sum()) * q
  return q


@pytest.mark.parametrize('order', [1, 2, 3, 4])
@pytest.mark.parametrize('successors', [1, 2, 32])
def test_tables_follow_the_formula(order, successors):
  rng = np.random.default_rng(order)
  texts = [rng.integers(1, 6, size=n).tolist() for n in rng.integers(1, 9, 25)]
  tables = ngram.count(texts, 6, order, successors, discount=0.6)
  contexts = np.array(
    list(itertools.product(range(-1, 6), repeat=order - 1)), np.int32
  )
  expected = [
    reference(texts, 6, order, successors, 0.6, context) for context in contexts
  ]
  q = jax.jit(ngram.probabilities)(tables, contexts)
  np.testing.assert_allclose(q, expected, rtol=1e-5)
  np.testing.assert_allclose(q.sum(-1), 1, rtol=1e-6)
  assert np.all(q > 0)


def test_leading_axes_are_free():
  tables = ngram.count(TEXTS, vocab_size=5, order=2)
  contexts = np.array([[[2], [3], [0]], [[4], [1], [ngram.NONE]]])
  q = np.asarray(ngram.probabilities(tables, contexts))
  assert q.shape == (2, 3, 5)
  np.testing.assert_array_equal(q[1, 0], at(tables, 4))


def test_only_the_most_frequent_contexts_stay():
  # 0 and 2 come three times, 3 twice and 4 once.
  tables = ngram.count(TEXTS, vocab_size=5, order=2, max_contexts=3)
  assert tables['order_2']['contexts'].tolist() == [[0], [2], [3]]
  whole = ngram.count(TEXTS, vocab_size=5, order=2)
  for token in (0, 2, 3):
    np.testing.assert_array_equal(at(tables, token), at(whole, token))
  np.testing.assert_array_equal(at(tables, 4), at(tables, 1))


def test_size_grows_with_what_was_seen_not_with_the_vocabulary():
  rng = np.random.default_rng(0)
  texts = [rng.zipf(1.3, size=50) % 32000 for _ in range(40)]
  tables = ngram.count(texts, vocab_size=32128, order=3, successors=8)
  assert sum(x.size for x in jax.tree.leaves(tables)) < 32128 + 8 * 2000 * 2


def test_file_keeps_tables_and_metadata(tmp_path):
  path = tmp_path / 'tables' / 'trigram.safetensors'
  tables = ngram.count(TEXTS, vocab_size=5, order=3)
  ngram.save(path, tables, {'vocabulary': 'abc'})
  loaded = ngram.load(path)
  assert jax.tree.structure(loaded) == jax.tree.structure(tables)
  jax.tree.map(np.testing.assert_array_equal, loaded, tables)
  assert ngram.load_metadata(path) == {'vocabulary': 'abc'}
  assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_files_may_lie_in_a_bucket(tmp_path, monkeypatch):
  """One that is a folder here, since a real one would need a network."""

  def here(operation, *paths, **options):
    local = (str(path).replace('gs://bucket', str(tmp_path)) for path in paths)
    if operation.__name__ == 'open':
      return operation(next(local), *paths[1:])
    return operation(*local, **options)

  # Whose way to buckets cannot be replaced.
  monkeypatch.setattr(gpath, '_is_tf_installed', lambda: False)
  names = ('copy', 'exists', 'isdir', 'makedirs', 'mkdir', 'open', 'replace')
  path, tables = 'gs://bucket/a/bigram.safetensors', ngram.count(TEXTS, 5, 2)
  with epath_testing.mock_epath(**dict.fromkeys(names, here)):
    ngram.save(path, tables, 'counted')
    loaded, metadata = ngram.load(path), ngram.load_metadata(path)
    with pytest.raises(FileNotFoundError, match='at gs://bucket/b'):
      ngram.load('gs://bucket/b')
  assert (tmp_path / 'a' / 'bigram.safetensors').is_file()
  jax.tree.map(np.testing.assert_array_equal, loaded, tables)
  assert metadata == 'counted'


def test_other_files_are_refused(tmp_path):
  path = tmp_path / 'x.safetensors'
  with pytest.raises(FileNotFoundError, match='found no file'):
    ngram.load(path)
  path.write_bytes(b'no safetensors file')
  with pytest.raises(ValueError, match='cut short'):
    ngram.load(path)
  ngram.safetensors.numpy.save_file({'a': np.zeros(2)}, path)
  with pytest.raises(ValueError, match='another kind of file'):
    ngram.load_metadata(path)


@pytest.mark.parametrize(
  'change, message',
  [
    ({'order': 0}, 'order to be at least 1'),
    ({'successors': 0}, 'successors to be at least 1'),
    ({'discount': 1.0}, r'discount to be in \(0, 1\)'),
    ({'sequences': []}, 'at least one id'),
    ({'sequences': [[]]}, 'at least one id'),
    ({'sequences': [[5]]}, 'ids in 0..4'),
    ({'sequences': [[-1]]}, 'ids in 0..4'),
    ({'order': 5}, 'Lower the order'),
  ],
)
def test_bad_arguments_are_named(change, message):
  arguments = {'sequences': TEXTS, 'vocab_size': 5, 'order': 2}
  with pytest.raises(ValueError, match=message):
    ngram.count(**arguments | change)
