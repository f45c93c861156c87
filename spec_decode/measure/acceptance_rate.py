# SPDX-License-Identifier: Apache-2.0
"""The paper's alpha: mean of beta over text that the target generated.

The target writes the text; then both models score it in one parallel pass
each, and beta = sum_x min(p(x) / l, q(x)) is averaged over its positions
(tables 3 and 5). Not to be mixed up with `beta_tested` of a speculative run,
which sees only prefixes before a rejection, nor with accepted / drawn; `counts`
are of such a run.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import tqdm

from spec_decode import acceptance
from spec_decode import autoregressive
from spec_decode import checks
from spec_decode import randomness
from spec_decode import sampling as sampling_lib
from spec_decode.data import text
from spec_decode.drafts import ModelDraft
from spec_decode.speculative import Speculation
from spec_decode.workload import Workload


@dataclasses.dataclass(frozen=True)
class Ratio:
  """sum(parts) / sum(wholes) over examples, with its standard error.

  Tokens of one example are not independent, so examples are the clusters.
  """

  value: float
  error: float
  n: float  # sum(wholes)

  @classmethod
  def of(cls, parts, wholes) -> 'Ratio':
    parts, wholes = np.asarray(parts, float), np.asarray(wholes, float)
    total, clusters = wholes.sum(), len(wholes)
    if total == 0:
      return cls(float('nan'), float('nan'), 0.0)
    value = parts.sum() / total
    if clusters < 2:
      return cls(float(value), float('nan'), float(total))
    spread = np.sum((parts - value * wholes) ** 2) * clusters / (clusters - 1)
    return cls(float(value), float(np.sqrt(spread) / total), float(total))


def model_hidden(model, params, inputs, tokens, prompt=None):
  """Teacher-forced hidden states [B, W, E] before tokens [B, W], in one call.

  `prompt` is (tokens [B, P], lengths [B]) that they follow; default one id 0.
  """
  prompt, length = prompt or autoregressive.default_prompt(inputs)
  capacity = prompt.shape[1] + tokens.shape[1]
  cache = autoregressive.prefill(model, params, inputs, prompt, capacity)
  last = jnp.take_along_axis(prompt, length[:, None] - 1, axis=1)
  previous = jnp.concatenate([last, tokens[:, :-1]], axis=1)
  hidden, _ = model.extend(params, cache, previous, length - 1)
  return hidden


def model_logits(model, params, *args):
  """Teacher-forced logits [B, W, V]; arguments as `model_hidden`."""
  return model.logits(params, model_hidden(model, params, *args))


def draft_distributions(draft, params, inputs, tokens, size, prompt=None):
  """q [B, W, V] of any draft before each of tokens [B, W].

  A model needs one pass. Other drafts are asked for one guess per position.
  """
  if isinstance(draft, ModelDraft):
    logits = model_logits(draft.model, params, inputs, tokens, prompt)
    sampling = dataclasses.replace(draft.sampling, vocab_size=size)
    return sampling_lib.distribution(logits, sampling)
  one = dataclasses.replace(draft, gamma=1)
  prompt, start = prompt or autoregressive.default_prompt(inputs)
  rows, width = tokens.shape
  index = start[:, None] + jnp.arange(width)
  buffer = jnp.pad(prompt, ((0, 0), (0, width + 2)))
  buffer = buffer.at[jnp.arange(rows)[:, None], index].set(tokens)
  # Which guess is drawn does not matter for q.
  keys = randomness.row_keys(0, jnp.arange(rows))

  def guess(cache, length):
    proposal = one.propose(params, cache, buffer, length, keys, None, size)
    q = proposal.q
    if q is None:
      q = jax.nn.one_hot(proposal.tokens, size)
    # Nothing was guessed: nothing can be accepted.
    return proposal.cache, q[:, 0] * (proposal.count > 0)[:, None]

  cache = one.start(params, inputs, prompt, buffer.shape[1])
  _, q = lax.scan(guess, cache, index.T)
  return jnp.moveaxis(q, 0, 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def betas(
  config: Speculation,
  lenience: tuple[float, ...],
  params: Any,
  draft_params: Any,
  inputs: Any,
  tokens: jax.Array,
  prompt: tuple[jax.Array, jax.Array] | None = None,
  hidden: jax.Array | None = None,
) -> jax.Array:
  """beta at every position of tokens [B, W], for each l: [len(l), B, W].

  Tokens follow `prompt`, as (tokens [B, P], lengths [B]); default one id 0.
  `hidden` is the target's `model_hidden`, where it is known already.
  """
  if hidden is None:
    hidden = model_hidden(config.target, params, inputs, tokens, prompt)
  logits = config.target.logits(params, hidden)
  size = config.sampling.vocab_size or logits.shape[-1]
  q = draft_distributions(
    config.draft, draft_params, inputs, tokens, size, prompt
  )
  return jnp.stack(
    [
      acceptance.acceptance_probability(
        logits, tokens, q, config.sampling, each
      )
      for each in lenience
    ]
  )


@dataclasses.dataclass(frozen=True, eq=False)
class TargetText:
  """One batch of text that a target wrote, W tokens wide.

  Attributes:
    batch: what it was asked.
    tokens: [B, W], where W holds the longest row.
    length: [B].
    hidden: [B, W, E], the target's `model_hidden` of it.
  """

  batch: text.Batch
  tokens: np.ndarray
  length: np.ndarray
  hidden: np.ndarray


# What `target_texts` gave: one target is often measured with many drafts.
_texts: dict[Any, list[TargetText]] = {}
_hidden = jax.jit(model_hidden, static_argnums=0)


def target_texts(
  workload: Workload, batch_size: int, num_tokens: int
) -> list[TargetText]:
  """Text that the target generates, to the batch that reaches `num_tokens`.

  Remembered, with the target's one pass over it: the draft has no say in it.
  """
  alone = dataclasses.replace(
    workload,
    draft=workload.target,
    gamma=0,
    draft_sampling=None,
    lenience=1.0,
  )
  key = alone, batch_size, num_tokens
  if key in _texts:
    return _texts[key]
  texts, done = [], 0
  model, params = workload.target.model, workload.params[0]
  bar = tqdm.tqdm(total=num_tokens, desc='text', unit='token', leave=None)
  with bar:
    for batch in workload.prompts.batches(batch_size):
      plain: autoregressive.Result = workload.decode_plain(batch)
      length = np.asarray(plain.length)
      width = text.rounded(int(length.max()), 32)
      tokens = np.asarray(plain.tokens)[:, :width]
      hidden = _hidden(model, params, batch.inputs, tokens, batch.prompt)
      texts.append(TargetText(batch, tokens, length, np.asarray(hidden)))
      done += int(np.sum(length[: batch.count]))
      bar.update(min(done, num_tokens) - bar.n)
      if done >= num_tokens:
        break
    bar.total = bar.n  # the prompts may have ended before
  _texts[key] = texts
  return texts


COUNTED = ('num_tokens', 'target_calls', 'drawn', 'tested', 'accepted')


def counts(num_tokens, target_calls, drawn, tested, accepted) -> dict[str, Any]:
  """Acceptance in speculative runs, with standard errors.

  Args, of each example as in `speculative.Result`:
    num_tokens, target_calls: their ratio is what a call yields.
    drawn: guesses.
    tested: those up to the first rejected one of each block.
    accepted: those that stood.
  """
  found = {}
  for name, parts, wholes in (
    ('tokens_per_call', num_tokens, target_calls),
    ('accepted_per_tested', accepted, tested),
    ('accepted_per_drawn', accepted, drawn),
  ):
    ratio = Ratio.of(parts, wholes)
    found |= {name: ratio.value, f'{name}_error': ratio.error}
  return found


def _decoded(workload: Workload, batch_size: int, least: int) -> dict[str, Any]:
  """`counts` and the mean beta of tested guesses, in a speculative run."""
  config = workload.speculation(measure_beta=True)
  columns = {name: [] for name in (*COUNTED, 'beta_tested')}
  for batch in workload.prompts.batches(min(batch_size, least)):
    result = workload.decode(batch, config)
    for name, values in columns.items():
      field = 'length' if name == 'num_tokens' else name
      values.extend(np.asarray(getattr(result, field))[: batch.count])
    if len(columns['tested']) >= least:
      break
  beta = Ratio.of(columns.pop('beta_tested'), columns['tested'])
  return {
    'examples': len(columns['tested']),
    'gamma': workload.gamma,
    'beta_tested': beta.value,
    'beta_tested_error': beta.error,
    **counts(**columns),
  }


def problems(lenience: tuple[float, ...], **arguments) -> list[str]:
  """What `measure` cannot work on."""
  found = checks.below(1, arguments, 'num_tokens', 'batch_size')
  found += checks.below(0, arguments, 'num_decoded')
  if not lenience or not all(0 < each <= 1 for each in lenience):
    found.append(
      f'Expected levels of lenience, each in (0, 1], got {lenience}. (1.0,) is'
      ' the exact one.'
    )
  return found


def measure(
  workload: Workload,
  output_dir: str,
  earlier: dict[str, Any] | None = None,
  num_tokens: int = 10_000,
  lenience: tuple[float, ...] = (1.0,),
  batch_size: int | None = None,
  num_decoded: int = 0,
) -> dict[str, Any]:
  """alpha over `num_tokens` target-generated tokens, with its error.

  Args:
    workload: whose drafts and target are compared.
    output_dir: unused.
    earlier: unused.
    num_tokens: stop once there are so many.
    lenience: levels l, the first for `alpha` itself.
    batch_size: of rows scored together, if not the workload's. It does not
      change the text.
    num_decoded: decode so many examples with speculation too, for what really
      was accepted.

  Returns:
    For a record: per lenience alpha, standard error, tokens and examples; and
    what `counts` makes of the speculative run, under 'decoded'.
  """
  del output_dir, earlier
  config = workload.speculation()
  sums, lengths = [], []
  size = batch_size or workload.batch_size
  for written in target_texts(workload, size, num_tokens):
    batch, tokens = written.batch, written.tokens
    beta = np.asarray(
      betas(
        config, tuple(lenience), *workload.params, batch.inputs, tokens,
        batch.prompt, written.hidden,
      )
    )  # fmt: skip
    real = np.arange(tokens.shape[1]) < written.length[:, None]
    sums.extend((beta * real).sum(-1).T[: batch.count])
    lengths.extend(written.length[: batch.count])
  rows = []
  for i, each in enumerate(lenience):
    ratio = Ratio.of([s[i] for s in sums], lengths)
    rows.append(
      {
        'lenience': each,
        'alpha': ratio.value,
        'standard_error': ratio.error,
        'tokens': int(ratio.n),
        'examples': len(lengths),
      }
    )
  found = rows[0] | {'by_lenience': rows}
  if num_decoded:
    found['decoded'] = _decoded(workload, size, num_decoded)
  return found
