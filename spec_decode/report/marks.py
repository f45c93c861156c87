# SPDX-License-Identifier: Apache-2.0
"""What happened to the tokens of a block, and how text shows it."""

from collections.abc import Iterator

from spec_decode import speculative

# What happened -> (mark before, mark after, colour on a terminal, meaning).
MARKS = {
  'accepted': ('', '', 'green', 'accepted guess'),
  'rejected': ('[-', '-]', 'red strike', 'rejected guess'),
  'unread': ('(', ')', 'dim', 'guess after a rejection'),
  'correction': ('{+', '+}', 'bold blue', 'correction by the target'),
  'bonus': (
    '{*', '*}', 'bold magenta', 'token after all guesses were accepted',
  ),
}  # fmt: skip


def marked(what: str, text: str) -> str:
  before, after, *_ = MARKS[what]
  return before + text + after


LEGEND = ', '.join(marked(what, row[3]) for what, row in MARKS.items())


def judged(block: speculative.Block) -> Iterator[tuple[str, int, int]]:
  """(what happened, token id, offset in the block), in order, of one row.

  Args:
    block: of a single row, as NumPy: its arrays lack the leading axis.
  """
  for i in range(block.drawn):
    what = 'accepted' if i < block.accepted else 'unread'
    what = 'rejected' if i == block.accepted else what
    yield what, int(block.guesses[i]), i
  if block.count > block.accepted:
    what = 'correction' if block.accepted < block.drawn else 'bonus'
    yield what, int(block.tokens[block.accepted]), int(block.accepted)
