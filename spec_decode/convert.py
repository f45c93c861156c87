# SPDX-License-Identifier: Apache-2.0
"""Networks from any layout that is read here into T5X's checkpoints."""

import os
from typing import Any

from spec_decode import checks
from spec_decode.models import checkpoints
from spec_decode.workload import Network

_SAVERS = {
  'orbax': checkpoints.save_t5x_orbax,
  'legacy': checkpoints.save_t5x_legacy,
}


def problems(
  target: Network, draft: Network, layout: str, **arguments
) -> list[str]:
  """What `to_t5x` cannot write."""
  found = target.stored_problems() + draft.stored_problems()
  found += checks.below(1, arguments, 'step')
  if layout not in _SAVERS:
    found.append(
      f'Expected layout in {list(_SAVERS)}, got {layout!r}. Choose one.'
    )
  return found


def to_t5x(
  output_dir: str,
  target: Network,
  draft: Network,
  layout: str = 'orbax',
  step: int = 1000,
  dtype: str = 'float32',
) -> dict[str, Any]:
  """Writes `output_dir`/{target,draft}/checkpoint_<step>.

  Args:
    output_dir: of the two checkpoints.
    target: with a checkpoint.
    draft: likewise.
    layout: 'orbax' or 'legacy'.
    step: in the name; T5X finds no checkpoint of step 0.
    dtype: float32 or bfloat16.

  Returns:
    For a record: what was read and what was written.
  """
  written = {}
  for half, network in (('target', target), ('draft', draft)):
    params = checkpoints.load(network.path, network.config)
    directory = os.path.join(output_dir, half)
    _SAVERS[layout](directory, params, step, dtype)
    path = os.path.join(directory, f'checkpoint_{step}')
    written[half] = {'read': network.checkpoint, 'written': path}
  return written
