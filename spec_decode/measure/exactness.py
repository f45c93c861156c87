# SPDX-License-Identifier: Apache-2.0
"""Whether speculation changes nothing, measured on the pair itself.

At temperature 0 its token ids are compared with plain decoding's, example by
example. Above, its samples are compared with the target's probabilities and
with plain samples, by chi-squared tests (appendix A.1).
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special
import numpy as np
import tqdm

from spec_decode import checks
from spec_decode import sampling as sampling_lib
from spec_decode.data import text
from spec_decode.measure import acceptance_rate
from spec_decode.workload import Workload

# A cell of a chi-squared test expects so many samples at least.
LEAST_EXPECTED = 10

_logits = jax.jit(acceptance_rate.model_logits, static_argnums=0)


def problems(
  workload: Workload, num_samples: int = 1, rows: int = 1, **arguments
) -> list[str]:
  """What `measure` cannot work on."""
  arguments |= {'num_samples': num_samples, 'rows': rows}
  found = checks.below(0, arguments, 'gammas', 'law_gammas', 'padding')
  found += checks.below(
    1, arguments, 'batch_sizes', 'num_prompts', 'num_samples', 'num_tokens',
    'rows',
  )  # fmt: skip
  if workload.temperature == 0:
    found.append(
      'Expected temperature > 0 for the samples, got 0. The ids are compared at'
      ' 0 whatever it is.'
    )
  if rows > 0 and num_samples % rows:
    found.append(
      f'Expected num_samples to be a multiple of rows, got {num_samples} and'
      f' {rows}. Change one of them.'
    )
  return found


def measure(
  workload: Workload,
  output_dir: str,
  earlier: dict[str, Any] | None = None,
  gammas: Sequence[int] = tuple(range(1, 9)),
  batch_sizes: Sequence[int] = (1, 3, 8),
  padding: int = 32,
  law_gammas: Sequence[int] = (1, 3),
  num_prompts: int = 4,
  num_samples: int = 2000,
  num_tokens: int = 2,
  rows: int = 500,
) -> dict[str, Any]:
  """Compares speculative with plain decoding, in ids and in law.

  Args:
    workload: what is compared, the law at its temperature. Its gamma and its
      batch size are not used.
    output_dir: unused.
    earlier: unused.
    gammas: guesses per block at temperature 0.
    batch_sizes: of both ways of decoding at temperature 0.
    padding: columns by which speculation's inputs are padded further than
      plain decoding's, once more at the last batch size.
    law_gammas: guesses per block of the samples.
    num_prompts: examples, from the first, that samples are drawn for.
    num_samples: of each prompt, gamma and way of decoding; a multiple of
      `rows`.
    num_tokens: new tokens of a sample.
    rows: samples decoded together.

  Returns:
    For a record: under 'ids' for each setting the examples, how many differ,
    and by how much the target's logits prefer plain decoding's token where
    each of these first differs; under 'law' for each prompt and gamma the
    tests of the first token and of all tokens of a sample.
  """
  del output_dir, earlier
  return {
    'ids': _compare_ids(workload, gammas, batch_sizes, padding),
    'law': _compare_laws(
      workload, law_gammas, num_prompts, num_samples, num_tokens, rows
    ),
  }


def _compare_ids(workload, gammas, batch_sizes, padding) -> list[dict]:
  """A row for each batch size, padding and gamma."""
  workload = dataclasses.replace(workload, temperature=0.0)
  found = []
  total = (len(batch_sizes) + 1) * len(gammas)
  with tqdm.tqdm(total=total, desc='exactness, ids', unit='setting') as bar:
    for size in batch_sizes:
      batches = list(workload.prompts.batches(size))
      plain = [np.asarray(workload.decode_plain(b).tokens) for b in batches]
      columns = (0, padding) if size == batch_sizes[-1] else (0,)
      for more, gamma in itertools.product(columns, gammas):
        config, gaps = workload.speculation(gamma), []
        for batch, theirs in zip(batches, plain):
          ours = workload.decode(_padded(batch, more), config).tokens
          gaps += logit_gaps(workload, batch, np.asarray(ours), theirs)
        found.append(
          {
            'batch_size': size,
            'padding': more,
            'gamma': gamma,
            'examples': sum(batch.count for batch in batches),
            'differing': len(gaps),
            'logit_gaps': gaps,
          }
        )
        bar.update()
  return found


def logit_gaps(
  workload: Workload, batch: text.Batch, ours: np.ndarray, theirs: np.ndarray
) -> list[float]:
  """Of each row that differs, how close the two tokens are where it begins to.

  Args:
    workload: has the target that scores the tokens, teacher-forced.
    batch: what was decoded.
    ours: int32 [B, N].
    theirs: int32 [B, N].

  Returns:
    The logit of their token over that of ours, of unequal rows in their order;
    near 0 it is a tie that rounding decides. Rows that fill up the batch are
    left out.
  """
  unequal = np.flatnonzero(np.any(ours != theirs, axis=1)[: batch.count])
  if not len(unequal):
    return []
  logits = np.asarray(
    _logits(
      workload.target.model, workload.params[0], batch.inputs, theirs,
      batch.prompt,
    ),
    np.float32,
  )  # fmt: skip
  place = np.argmax(ours != theirs, axis=1)[unequal]
  of = lambda tokens: logits[unequal, place, tokens[unequal, place]]
  return (of(theirs) - of(ours)).tolist()


def _compare_laws(
  workload, gammas, num_prompts, num_samples, num_tokens, rows
) -> list[dict]:
  """A row for each prompt and gamma."""
  # Only as wide as these few prompts need: they are repeated many times.
  prompts = dataclasses.replace(workload.prompts, num_examples=num_prompts)
  workload = dataclasses.replace(
    workload, prompts=prompts, max_new_tokens=num_tokens
  )
  (batch,) = prompts.batches(len(prompts.examples))
  law = _first_token_law(workload, batch)
  found, first = [], itertools.count(0, num_samples)
  total = batch.count * (1 + len(gammas))
  with tqdm.tqdm(total=total, desc='exactness, law', unit='draw') as bar:
    for row in range(batch.count):

      def samples(decode, row=row):
        # Never the keys of another call: all samples are independent.
        ids = next(first) + np.arange(num_samples)
        parts = [
          decode(_copies(batch, row, some)).tokens
          for some in np.split(ids, num_samples // rows)
        ]
        bar.update()
        return np.concatenate(parts)

      plain = samples(workload.decode_plain)
      for gamma in gammas:
        config = workload.speculation(gamma)
        fast = samples(functools.partial(workload.decode, config=config))
        counts = np.bincount(fast[:, 0], minlength=law.shape[1])
        found.append(
          {
            'prompt': prompts.examples[row].id,
            'gamma': gamma,
            'n': num_samples,
            'first_token': chi_squared(counts[None], num_samples * law[row]),
            'all_tokens': _two_samples(plain, fast),
          }
        )
  return found


def _first_token_law(workload: Workload, batch: text.Batch) -> np.ndarray:
  """p [B, V] of the first new token, as the target's sampling has it."""
  any_token = jnp.zeros((len(batch.inputs), 1), jnp.int32)
  logits = _logits(
    workload.target.model, workload.params[0], batch.inputs, any_token,
    batch.prompt,
  )  # fmt: skip
  p = sampling_lib.distribution(logits[:, 0], workload.sampling)
  return np.asarray(p, np.float64)


def _two_samples(some: np.ndarray, others: np.ndarray) -> dict[str, float]:
  """Tests that rows [N, K] and as many others come from one law."""
  _, outcome = np.unique(
    np.concatenate([some, others]), axis=0, return_inverse=True
  )
  outcome = outcome.reshape(2, len(some))
  size = outcome.max() + 1
  counts = np.stack([np.bincount(each, minlength=size) for each in outcome])
  return chi_squared(counts, counts.mean(axis=0))


def chi_squared(counts: np.ndarray, expected: np.ndarray) -> dict[str, float]:
  """Pearson's test of samples of one size against what is expected of each.

  Outcomes that expect fewer than `LEAST_EXPECTED` are one cell together, with
  the rarest of the others if they are still too few.

  Args:
    counts: [S, V], of each outcome in each of S samples.
    expected: [V]; the mean of two samples if these are compared.

  Returns:
    statistic, degrees_of_freedom and p_value, which is NaN where only one cell
    is left.
  """
  order = np.argsort(-expected)
  counts, expected = counts[:, order], expected[order]
  rarer = np.cumsum(expected[::-1])[::-1] - expected
  alone = (expected >= LEAST_EXPECTED) & (rarer >= LEAST_EXPECTED)
  pool = lambda x: np.append(
    x[..., alone], x[..., ~alone].sum(axis=-1, keepdims=True), axis=-1
  )
  counts, expected = pool(counts), pool(expected)
  statistic = float(np.sum((counts - expected) ** 2 / expected))
  degrees = len(expected) - 1
  p_value = special.gammaincc(degrees / 2, statistic / 2)
  return {
    'statistic': statistic,
    'degrees_of_freedom': degrees,
    'p_value': float(p_value) if degrees else float('nan'),
  }


def _padded(batch: text.Batch, columns: int) -> text.Batch:
  """The same batch with more padding behind inputs and prompts."""
  pad = lambda x: np.pad(x, ((0, 0), (0, columns)))
  prompt = batch.prompt and (pad(batch.prompt[0]), batch.prompt[1])
  return dataclasses.replace(batch, inputs=pad(batch.inputs), prompt=prompt)


def _copies(batch: text.Batch, row: int, ids: np.ndarray) -> text.Batch:
  """One row of a batch once for each of the ids that choose the samples."""
  repeat = lambda x: np.repeat(x[row : row + 1], len(ids), axis=0)
  prompt = batch.prompt and tuple(map(repeat, batch.prompt))
  return text.Batch(repeat(batch.inputs), ids, len(ids), prompt)
