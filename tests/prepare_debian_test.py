# SPDX-License-Identifier: Apache-2.0
"""Near-duplicates of training text leave the held-out side."""

import collections
import importlib.util
import pathlib
import sys

from absl import flags
import pytest

PATH = pathlib.Path(__file__).parents[1] / 'scripts' / 'prepare_debian.py'


@pytest.fixture(scope='module')
def script():
  """The script as a module; its flags leave with it."""
  known = set(flags.FLAGS)
  spec = importlib.util.spec_from_file_location('prepare_debian', PATH)
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look their module up.
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    flags.FLAGS.mark_as_parsed()  # all at their defaults
    yield module
  for name in set(flags.FLAGS) - known:
    delattr(flags.FLAGS, name)


TRAINING = [
  'A small viewer for images of version 12 and others',
  'Reads the mail of one user and writes it to disk',
]
# Held-out sentence -> the part of its tokens that one training source holds.
HELD_OUT = {
  # All of it, whatever the digits, case, order and punctuation.
  'Version 7 images: others, and a viewer!': 1.0,
  # 4 of 5, which is the limit.
  'Reads the mail of someone': 0.8,
  # 3 of 4.
  'Writes the mail elsewhere': 0.75,
  # Words count as often as they stand: the one "mail" is not there thrice.
  'Mail mail mail user': 0.5,
  # Half from either source, which are not added up.
  'Small viewer reads mail': 0.5,
  'Nothing alike here today': 0.0,
}


def test_shared_parts(script):
  found = script.shared_parts(list(HELD_OUT), TRAINING)
  assert found.tolist() == pytest.approx(list(HELD_OUT.values()))


def test_near_duplicates_are_removed_from_the_held_out_side(
  script, monkeypatch
):
  monkeypatch.setattr(script, 'is_held_out', lambda group: group == 'held')
  monkeypatch.setattr(script, '_hash', lambda text: 0)
  pair = lambda group, text: script.Pair(text, group, group, text, 'Ziel')
  pairs = [pair('train', text) for text in TRAINING]
  pairs += [pair('held', text) for text in HELD_OUT]
  removed = collections.Counter()
  train, held = script.split(pairs, removed)
  assert [p.source for p in train] == TRAINING
  assert {p.source for p in held} == {
    text for text, part in HELD_OUT.items() if part < 0.8
  }
  assert +removed == {'held-out near-duplicate of training': 2}
