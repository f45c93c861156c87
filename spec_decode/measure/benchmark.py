# SPDX-License-Identifier: Apache-2.0
"""How close the loops come to what the machine can do, on random weights.

The bound of plain decoding is reading the decoder's weights once per token.
Speculation adds overhead to its draft and target calls; `costs.Costs.overhead`
says how much.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import tqdm

from spec_decode import checks
from spec_decode.autoregressive import Limits
from spec_decode.measure import costs as costs_lib
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation
from spec_decode.workload import Network

# Read to find out how fast memory is.
_MEGABYTES = 256
# Calls of a part per timing.
_CALLS = 20


def step_bytes(params: Any) -> int:
  """Bytes of weights that one decoder step must read.

  All of the decoder but the kernels that project the inputs, which are used
  once per batch; plus a tied output table.
  """
  total = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(params['decoder']):
    names = [key.key for key in path]
    if 'encoder_decoder_attention' in names and names[-2] in ('key', 'value'):
      continue
    total += leaf.nbytes
  if 'logits_dense' not in params['decoder']:
    total += params['token_embedder']['embedding'].nbytes
  return total


@dataclasses.dataclass(frozen=True)
class _Pair:
  """What is timed, and how."""

  target: Network
  draft: Network
  sampling: Sampling
  input_length: int
  repeats: int

  @functools.cached_property
  def params(self) -> tuple[Any, Any]:
    return self.target.load(), self.draft.load()

  def _arguments(self, batch: int, gamma: int, capacity: int):
    config = Speculation(
      self.target.model,
      self.draft.as_draft(gamma, self.sampling),
      self.sampling,
      Limits(capacity, eos_id=-1),
    )
    inputs = jnp.ones((batch, self.input_length), jnp.int32)
    return config, (*self.params, inputs)

  def thunk(self, part: str, batch: int, gamma: int, capacity: int):
    config, rest = self._arguments(batch, gamma, capacity)
    return costs_lib.thunks(config, [part], *rest, calls=_CALLS)[part]

  def costs(self, batch: int, gamma: int, capacity: int) -> costs_lib.Costs:
    config, rest = self._arguments(batch, gamma, capacity)
    return costs_lib.costs(config, *rest, repeats=self.repeats)


def problems(target: Network, draft: Network, **arguments) -> list[str]:
  """What `measure` cannot work on."""
  found = target.target_problems() + draft.problems()
  found += checks.below(0, arguments, 'temperature')
  return found + checks.below(
    1, arguments, 'gamma', 'widths', 'batch_sizes', 'capacities',
    'input_length', 'repeats',
  )  # fmt: skip


def measure(
  output_dir: str,
  target: Network,
  draft: Network,
  gamma: int = 3,
  widths: tuple[int, ...] = (4, 8),
  batch_sizes: tuple[int, ...] = (1, 8),
  capacities: tuple[int, int] = (64, 512),
  input_length: int = 64,
  temperature: float = 0.0,
  repeats: int = 5,
) -> dict[str, Any]:
  """Times target and draft at several widths, batch sizes and capacities.

  Args:
    output_dir: unused.
    target: random or trained.
    draft: likewise.
    gamma: guesses per block.
    widths: of the target's calls, against a plain step, at the first batch
      size.
    batch_sizes: rows.
    capacities: lengths of the cache between which a plain step is compared.
    input_length: tokens of the inputs.
    temperature: of both models.
    repeats: of every timing.

  Returns:
    For a record: bandwidth, width and capacity ratios, a row per batch size.
  """
  del output_dir
  sampling = Sampling(temperature, vocab_size=target.model.vocab_size)
  pair = _Pair(target, draft, sampling, input_length, repeats)
  short, long = capacities
  batch = batch_sizes[0]
  rows = []
  for size in tqdm.tqdm(batch_sizes, desc=f'benchmark {target.name}'):
    cost = pair.costs(size, gamma, short)
    row = {
      'batch_size': size,
      'gamma': gamma,
      'c': cost.c,
      'c_error': cost.c_error,
      'c_alone': cost.c_alone,
      'overhead': cost.overhead,
    }
    for name in (
      'plain_step', 'draft_in_loop', 'draft_alone', 'draft_and_target',
      'iteration',
    ):  # fmt: skip
      row[f'{name}_ms'] = 1e3 * getattr(cost, name)
    row['target_wide_ms'] = 1e3 * cost.wide[gamma]
    rows.append(row)
  # Ratios are of timings that take turns.
  numbers = jnp.ones((_MEGABYTES * 2**18,), jnp.float32)
  seconds = costs_lib.medians(
    {
      'plain': pair.thunk('plain_step', batch, 0, short),
      'long': pair.thunk('plain_step', batch, 0, long),
      'read': functools.partial(jax.jit(jnp.sum), numbers),
      **{w: pair.thunk('target', batch, w - 1, short) for w in widths},
    },
    repeats,
  )
  plain, size = seconds['plain'], step_bytes(pair.params[0])
  bandwidth = numbers.nbytes / seconds['read']
  return {
    'target': target.name,
    'draft': draft.name,
    'bandwidth_gb_s': bandwidth / 1e9,
    'step_megabytes': size / 1e6,
    'bandwidth_used': size * _CALLS / plain / bandwidth,
    'wide_over_one': {w: seconds[w] / plain for w in widths},
    'capacity_ratio': seconds['long'] / plain,
    'rows': rows,
  }
