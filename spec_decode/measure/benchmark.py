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

from spec_decode.autoregressive import Limits
from spec_decode.measure import costs as costs_lib
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation
from spec_decode.workload import Network


def read_bandwidth(megabytes: int = 256, repeats: int = 7) -> float:
  """Bytes per second at which one compiled reduction reads memory."""
  x = jnp.ones((megabytes * 2**18,), jnp.float32)
  total = jax.jit(jnp.sum)
  seconds = costs_lib.medians({'sum': lambda: total(x)}, repeats)['sum']
  return x.nbytes / seconds


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


def _costs(target, draft, params, inputs, gamma, sampling, length, repeats):
  config = Speculation(
    target.model,
    draft.as_draft(gamma, sampling),
    sampling,
    Limits(length, eos_id=-1),
  )
  return costs_lib.costs(config, *params, inputs, repeats, calls=10)


def measure(
  output_dir: str,
  target: Network,
  draft: Network,
  gammas: tuple[int, ...] = (3, 7),
  batch_sizes: tuple[int, ...] = (1, 8),
  capacities: tuple[int, ...] = (64, 512),
  input_length: int = 64,
  temperature: float = 0.0,
  repeats: int = 5,
) -> dict[str, Any]:
  """Times target and draft at several widths, batch sizes and capacities.

  Args:
    output_dir: unused.
    target: random or trained.
    draft: likewise.
    gammas: block sizes; the target's calls are gamma + 1 wide.
    batch_sizes: rows.
    capacities: lengths of the cache at which a plain step is timed.
    input_length: tokens of the inputs.
    temperature: of both models.
    repeats: of every timing.

  Returns:
    For a record: bandwidth, and a row per (batch size, gamma).
  """
  del output_dir
  params = target.load(), draft.load()
  sampling = Sampling(temperature, vocab_size=target.model.vocab_size)
  bandwidth = read_bandwidth()
  read = step_bytes(params[0])
  measured = functools.partial(_costs, target, draft, params)
  rows = []
  for batch in tqdm.tqdm(batch_sizes, desc=f'benchmark {target.name}'):
    inputs = jnp.ones((batch, input_length), jnp.int32)
    one = measured(inputs, 0, sampling, capacities[0], repeats).target_wide
    for gamma in gammas:
      cost = measured(inputs, gamma, sampling, capacities[0], repeats)
      rows.append(
        {
          'batch_size': batch,
          'gamma': gamma,
          'wide_over_one': cost.target_wide / one,
          'c': cost.c,
          'c_alone': cost.c_alone,
          'overhead': cost.overhead,
        }
        | {
          f'{name}_ms': 1e3 * value
          for name, value in dataclasses.asdict(cost).items()
          if name != 'gamma'
        }
      )
  inputs = jnp.ones((1, input_length), jnp.int32)
  steps = {
    capacity: measured(inputs, 0, sampling, capacity, repeats).plain_step
    for capacity in capacities
  }
  first = steps[capacities[0]]
  return {
    'target': target.name,
    'draft': draft.name,
    'bandwidth_gb_s': bandwidth / 1e9,
    'step_megabytes': read / 1e6,
    'bandwidth_used': read / first / bandwidth,
    'plain_step_ms_by_capacity': {k: 1e3 * v for k, v in steps.items()},
    'capacity_ratio': steps[capacities[-1]] / first,
    'rows': rows,
  }
