# SPDX-License-Identifier: Apache-2.0
"""What the copy rule copies, case by case; its law is in `drafts_test`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_decode.copy_draft import CopyDraft


@functools.partial(jax.jit, static_argnums=0)
def propose(draft, text, length, inputs):
  """One block of guesses for rows of text [B, S]."""
  cache = draft.start(None, inputs, text[:, :1], text.shape[1])
  keys, hidden = None, jnp.zeros((len(text), 1))
  return draft.propose(None, cache, text, length, keys, hidden, 16)


# inputs, text and the expected guesses of 4.
COPIES = {
  'first token of all': ([2, 3, 1], [0], []),
  'nothing occurs again': ([5, 6, 1], [0, 2, 3], []),
  'from the inputs, up to their end': ([6, 7, 8, 9, 1], [0, 7], [8, 9, 1]),
  'not into the padding': ([6, 7, 8, 0, 0], [0, 7], [8]),
  'nothing follows': ([6, 7, 8, 0, 0], [0, 8], []),
  'the most recent': ([6, 7, 2, 2, 6, 7, 3, 3, 3, 1], [0, 7], [3, 3, 3, 1]),
  'text before inputs': ([6, 7, 7, 7, 1], [0, 6, 2, 3, 4, 5, 6], [2, 3, 4, 5]),
  'the longest': ([2, 3, 4, 9, 9, 1], [0, 4, 8, 2, 3, 4], [9, 9, 1]),
  'no longer than `longest`': (
    [2, 3, 4, 5, 9, 1],
    [0, 3, 4, 5, 8, 2, 3, 4, 5],
    [8, 2, 3, 4],
  ),
  'text that repeats itself': ([9], [0, 2, 3, 5, 2, 3], [5, 2, 3, 5]),
  'one token that repeats': ([9], [0, 6, 6], [6, 6, 6, 6]),
  'ids that are none': ([6, 12, 8, 1], [0, 6], []),
  'up to an id that is none': ([6, 8, 12, 1], [0, 6], [8]),
  'no inputs': ([], [0, 2, 2], [2, 2, 2, 2]),
}


@functools.cache
def copies():
  """Guesses and counts of all cases, in one batch."""
  inputs = np.zeros((len(COPIES), 10), np.int32)
  text = np.full((len(COPIES), 12), 6)
  for row, (given, written, _) in enumerate(COPIES.values()):
    inputs[row, : len(given)] = given
    text[row, : len(written)] = written
  length = [len(written) for _, written, _ in COPIES.values()]
  draft = CopyDraft(vocab_size=12, gamma=4)
  proposal = propose(draft, text, np.array(length), inputs)
  assert proposal.q is None
  return dict(zip(COPIES, zip(proposal.tokens, proposal.count)))


@pytest.mark.parametrize('name', COPIES)
def test_copies(name):
  tokens, count = copies()[name]
  assert tokens[:count].tolist() == COPIES[name][-1]


@pytest.mark.parametrize('inputs', [[[6, 7, 8]], [[]]])
def test_copies_end_with_inputs_of_full_width(inputs):
  draft = CopyDraft(vocab_size=12, gamma=4)
  inputs = np.array(inputs, np.int32)
  proposal = propose(draft, np.array([[0, 8, 9]]), np.array([2]), inputs)
  assert proposal.count.tolist() == [0]


def test_copies_only_after_endings_that_are_long_enough():
  inputs = np.array([[6, 7, 8, 9]] * 3)
  text = np.array([[0, 6, 7], [0, 5, 7], [0, 7, 0]])
  for shortest, expected in ((1, [2, 2, 2]), (2, [2, 0, 0])):
    draft = CopyDraft(vocab_size=12, gamma=4, shortest=shortest)
    proposal = propose(draft, text, np.array([3, 3, 2]), inputs)
    assert proposal.count.tolist() == expected


def test_copying_needs_ids_as_inputs():
  for inputs in (np.zeros((3, 4)), np.zeros((3,), int), None):
    with pytest.raises(ValueError, match='token ids'):
      CopyDraft(12, 3).start(None, inputs, np.zeros((3, 1), int), 8)
  with pytest.raises(ValueError, match='1 <= shortest <= longest'):
    CopyDraft(12, 3, shortest=4, longest=3)
