# SPDX-License-Identifier: Apache-2.0
"""What a decoded file says about itself."""

import json

import tiny

from spec_decode import generate


def test_counters_leave_out_the_rows_that_fill_up_a_batch(tmp_path):
  workload = tiny.make(tmp_path, number=5, batch_size=4)
  last = list(workload.batches())[-1]
  assert (last.count, len(last.ids)) == (1, 4)
  found = generate.generate(
    workload, str(tmp_path), num_samples=0, compare=False
  )
  text = (tmp_path / 'predictions.jsonl').read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  assert [line['id'] for line in lines] == [f'example {i}' for i in range(5)]
  assert found['examples'] == 5
  lengths = sum(len(line['tokens']) for line in lines)
  assert found['tokens'] == lengths
  calls = sum(line['target_calls'] for line in lines)
  assert found['target_calls'] == sum(found['histogram']) == calls
  assert found['tokens_per_call'] == lengths / calls
  # Every call commits its accepted guesses and a token more, but where a guess
  # ends the row.
  accepted = sum(i * n for i, n in enumerate(found['histogram']))
  assert accepted == sum(line['accepted'] for line in lines)
  assert 0 <= calls + accepted - lengths <= 5
