# SPDX-License-Identifier: Apache-2.0
"""One decoded example in every detail: figure 1, and a page to look at."""

import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_decode import acceptance
from spec_decode import sampling as sampling_lib
from spec_decode import speculative
from spec_decode.measure import acceptance_rate
from spec_decode.measure import timeline
from spec_decode.report import marks
from spec_decode.report import trace_page
from spec_decode.speculative import Speculation
from spec_decode.workload import Workload

# Name in a record -> name in `_scores`.
_OF_GUESS = {'p': 'p', 'q': 'q', 'beta': 'beta'}
_OF_EXTRA = {
  'correction': {'p': 'p_extra', 'q': 'q_extra', 'beta': 'beta'},
  'bonus': {'p': 'p_extra'},
}


problems = timeline.problems


def measure(
  workload: Workload,
  output_dir: str,
  earlier: dict[str, Any] | None = None,
  example: int = 0,
) -> dict[str, Any]:
  """Traces one example and writes trace.html.

  Args:
    workload: what to decode.
    output_dir: gets trace.html.
    earlier: unused.
    example: which one, by number.

  Returns:
    For a record: the example, its blocks as `blocks` has them, and the profile
    that `timeline.profile` makes of the same decode.
  """
  del earlier
  found = {
    'example': workload.prompts.examples[example].id,
    'inputs': workload.prompts.shown(example),
    'target': workload.target.name,
    'draft': workload.draft.name,
    'task': workload.prompts.task,
    'temperature': workload.temperature,
    'gamma': workload.gamma,
    'lenience': workload.lenience,
    'replay': workload.replay,
    'blocks': blocks(workload, example),
    'profile': timeline.profile(workload, example, workload.gamma),
  }
  directory = pathlib.Path(output_dir)
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'trace.html').write_text(
    trace_page.page(found), encoding='utf-8'
  )
  return found


def blocks(workload: Workload, example: int) -> list[list[dict[str, Any]]]:
  """Per target call, the tokens it judged or made.

  Each token has id, text, what ('accepted', 'rejected' or 'unread' guess,
  'correction' after a rejection, 'bonus' without one), p of it, and, where
  the draft guessed, q of it and beta of its place.
  """
  (batch,) = itertools.islice(workload.prompts.batches(1), example, example + 1)
  config, params = workload.speculation(), workload.params
  found = [
    jax.tree.map(lambda x: np.asarray(x)[0], block)
    for block, _ in speculative.stream(
      config, *params, batch.inputs, workload.keys(batch), batch.prompt
    )
  ]
  # Each block becomes a row: what stood before it, its guesses, its extra.
  width = config.limits.max_new_tokens + config.draft.gamma + 1
  committed = np.concatenate([b.tokens[: b.count] for b in found])
  starts = np.cumsum([0, *(b.count for b in found)])
  rows = np.zeros((len(found), width), np.int32)
  extra = np.zeros_like(rows)
  for row, more, block, start in zip(rows, extra, found, starts):
    row[:start] = committed[:start]
    row[start : start + block.drawn] = block.guesses[: block.drawn]
    more[start + block.accepted] = block.tokens[block.accepted]
  inputs, prompt = jax.tree.map(
    lambda x: np.repeat(x, len(found), axis=0), (batch.inputs, batch.prompt)
  )
  scores = _scores(config, *params, inputs, rows, extra, prompt)
  scores = jax.device_get(scores)
  piece = workload.prompts.tokenizer.piece
  return [
    [
      {
        'id': token,
        'text': piece(token),
        'what': what,
        **{
          name: round(float(scores[score][i, start + offset]), 6)
          for name, score in _OF_EXTRA.get(what, _OF_GUESS).items()
        },
      }
      for what, token, offset in marks.judged(block)
    ]
    for i, (block, start) in enumerate(zip(found, starts))
  ]


@functools.partial(jax.jit, static_argnums=0)
def _scores(
  config: Speculation, params, draft_params, inputs, tokens, extra, prompt
) -> dict[str, jax.Array]:
  """p, q and beta [B, W] at tokens [B, W], and p and q of `extra` there."""
  logits = acceptance_rate.model_logits(
    config.target, params, inputs, tokens, prompt
  )
  p = sampling_lib.distribution(logits, config.sampling)
  q = acceptance_rate.draft_distributions(
    config.draft, draft_params, inputs, tokens, p.shape[-1], prompt
  )
  pick = lambda x, ids: jnp.take_along_axis(x, ids[..., None], axis=-1)[..., 0]
  return {
    'p': pick(p, tokens),
    'p_extra': pick(p, extra),
    'q': pick(q, tokens),
    'q_extra': pick(q, extra),
    'beta': acceptance.acceptance_probability(
      logits, tokens, q, config.sampling, config.lenience
    ),
  }
