# SPDX-License-Identifier: Apache-2.0
"""Trains targets and drafts: cross-entropy, distillation, maximising alpha.

Orbax keeps the state, so a run that is stopped goes on where it was; a larger
`steps` continues a finished one. The learning rate warms up, stays, and falls
to zero over the last `decay_steps`.
"""

from collections.abc import Callable
import dataclasses
import json
import pathlib
import time
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm

from spec_decode import checks
from spec_decode.models import checkpoints
from spec_decode.models import transformer
from spec_decode.workload import Network

Array = jax.Array


def cross_entropy(logits: Array, targets: Array, teacher: None) -> Array:
  """-log q(target) at each position: [B, W]."""
  del teacher
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def distillation(logits: Array, targets: Array, teacher: Array) -> Array:
  """Cross-entropy -sum_x p(x) log q(x) against the teacher's p: [B, W]."""
  del targets
  return optax.softmax_cross_entropy(logits, jax.nn.softmax(teacher))


def rejection(logits: Array, targets: Array, teacher: Array) -> Array:
  """1 - beta = 1 - sum_x min(p(x), q(x)): minimising it maximises alpha."""
  del targets
  p, q = jax.nn.softmax(teacher), jax.nn.softmax(logits)
  return 1.0 - jnp.minimum(p, q).sum(-1)


def distillation_and_rejection(logits, targets, teacher) -> Array:
  """Both: the second alone has no gradient where p and q do not overlap."""
  return distillation(logits, targets, teacher) + rejection(
    logits, targets, teacher
  )


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Warm-up, plateau and linear decay, in optimizer steps."""

  peak: float = 0.02
  warmup_steps: int = 200
  decay_steps: int = 500
  steps: int = 2000

  def __call__(self, step: Array) -> Array:
    step = jnp.asarray(step, jnp.float32)
    up = (step + 1) / max(self.warmup_steps, 1)
    down = (self.steps - step) / max(self.decay_steps, 1)
    return self.peak * jnp.clip(jnp.minimum(up, down), 0.0, 1.0)


def optimizer(schedule: Schedule) -> optax.GradientTransformation:
  """Adam with updates relative to each parameter's size, as T5 trains.

  T5's embeddings start at deviation 1 and its kernels far below: one absolute
  step for both leaves the embeddings where they began. With 250 steps of a
  3-layer net the loss came to 4.5 instead of 5.1.
  """
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),
    optax.scale_by_param_block_rms(),
    optax.scale_by_learning_rate(schedule),
  )


def shift_right(targets: Array) -> Array:
  """Decoder inputs of targets: id 0 first, the last target dropped."""
  return jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]


def make_step(
  config: transformer.T5Config,
  tx: optax.GradientTransformation,
  loss: Callable[[Array, Array, Array | None], Array],
  teacher_config: transformer.T5Config | None = None,
):
  """The jitted optimizer step; parameters of both networks are arguments."""
  module = transformer.network(config)

  def step(params, state, teacher_params, batch, dropout_key):
    inputs, targets = batch['inputs'], batch['targets']
    previous, weights = shift_right(targets), targets > 0
    soft = None
    if teacher_config is not None:
      soft = transformer.network(teacher_config).apply(
        {'params': teacher_params}, inputs, previous, enable_dropout=False
      )

    def mean_loss(params):
      logits = module.apply(
        {'params': params},
        inputs,
        previous,
        enable_dropout=True,
        rngs={'dropout': dropout_key},
      )
      losses = loss(logits, targets, soft)
      return jnp.sum(losses * weights) / jnp.sum(weights)

    value, grads = jax.value_and_grad(mean_loss)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  return jax.jit(step, donate_argnums=(0, 1))


def deepen(shallow: Any, fresh: Any) -> Any:
  """`shallow`'s weights, and `fresh` ones for the layers it lacks.

  The new layers add little to what passes through them, so the deeper network
  starts out as good as the shallow one. Training few layers first and then
  all is several times cheaper than all from the start.

  Raises:
    ValueError: the networks differ in more than the number of layers.
  """
  shallow = traverse_util.flatten_dict(shallow, sep='/')
  fresh = traverse_util.flatten_dict(fresh, sep='/')
  strange = sorted(
    name
    for name, leaf in shallow.items()
    if name not in fresh or fresh[name].shape != leaf.shape
  )
  if strange:
    raise ValueError(
      'Expected networks that differ only in their number of layers, got'
      f' other names or shapes: {strange[:5]}.'
    )
  for name, leaf in fresh.items():
    if name not in shallow:
      last = name.endswith(('out/kernel', 'wo/kernel'))
      shallow[name] = 0.1 * leaf if last else leaf
  return traverse_util.unflatten_dict(shallow, sep='/')


def problems(
  loss: Callable, teacher: Network | None, initial: Network | None, **arguments
) -> list[str]:
  """What `train` cannot work on."""
  found = checks.below(1, arguments, 'save_every', 'log_every')
  if (loss is not cross_entropy) != (teacher is not None):
    found.append(
      f'Expected a teacher exactly for the losses that need one, got loss'
      f' {loss.__name__} and teacher {teacher and teacher.name}.'
    )
  for network in (teacher, initial):
    if network is not None:
      found += network.stored_problems()
  return found


def train(
  output_dir: str,
  network: Network,
  batches: Any,
  schedule: Schedule = Schedule(),
  loss: Callable = cross_entropy,
  teacher: Network | None = None,
  initial: Network | None = None,
  seed: int = 0,
  save_every: int = 200,
  log_every: int = 20,
) -> dict[str, Any]:
  """Trains one network, or goes on with it, and writes its weights.

  Args:
    output_dir: gets `state/` (Orbax), `curve.jsonl` and `model.safetensors`;
      a state that is there already is gone on from.
    network: what to train.
    batches: `from_step(step)` yields {'inputs', 'targets'}; see
      `data.training.BucketedBatches`.
    schedule: the learning rate and the number of steps.
    loss: one of this module's losses.
    teacher: for the losses that need one.
    initial: whose checkpoint to begin with; the network itself, or a
      shallower one of the same widths, see `deepen`.
    seed: of the initial weights and the dropout.
    save_every: steps between two saved states.
    log_every: steps between two points of the curve.

  Returns:
    What a record keeps: steps, last loss, target tokens seen, seconds.
  """
  wrong = problems(
    loss, teacher, initial, save_every=save_every, log_every=log_every
  )
  if wrong:
    raise ValueError('\n'.join(wrong))
  directory = pathlib.Path(output_dir).expanduser().absolute()
  directory.mkdir(parents=True, exist_ok=True)
  teacher_params = None
  if teacher is not None:
    teacher_params = checkpoints.load(teacher.path, teacher.config)
  params = transformer.initial_params(network.config, seed)
  if initial is not None:
    params = deepen(checkpoints.load(initial.path, initial.config), params)
  tx = optimizer(schedule)
  state = {'params': params, 'optimizer': tx.init(params)}
  with ocp.CheckpointManager(
    directory / 'state',
    options=ocp.CheckpointManagerOptions(
      max_to_keep=2, save_interval_steps=save_every
    ),
  ) as manager:
    first = manager.latest_step() or 0
    if first > schedule.steps:
      raise ValueError(
        f'Expected at least the {first} steps that {directory} already has,'
        f' got {schedule.steps}. Raise steps or choose another output_dir.'
      )
    if first:
      state = manager.restore(first, args=ocp.args.StandardRestore(state))
    step_fn = make_step(network.config, tx, loss, teacher and teacher.config)
    result = _run(
      state, step_fn, teacher_params, batches, directory, manager, first,
      schedule.steps, seed, log_every,
    )  # fmt: skip
  checkpoints.save(
    directory / 'model.safetensors',
    result.pop('params'),
    metadata={
      'vocabulary': batches.vocabulary.fingerprint,
      'steps': str(schedule.steps),
    },
    dtype='bfloat16',
    overwrite=True,
  )
  return result


def _run(
  state, step_fn, teacher_params, batches, directory, manager, first, steps,
  seed, log_every,
):  # fmt: skip
  params, opt_state = state['params'], state['optimizer']
  stream = batches.from_step(first)
  key = jax.random.key(seed)
  losses, tokens, began = [], 0, time.time()
  with (directory / 'curve.jsonl').open('a') as curve:
    bar = tqdm.tqdm(range(first, steps), initial=first, total=steps)
    for step in bar:
      batch = next(stream)
      tokens += int(np.sum(batch['targets'] > 0))
      params, opt_state, value = step_fn(
        params, opt_state, teacher_params, batch, jax.random.fold_in(key, step)
      )
      losses.append(value)
      if (step + 1) % log_every == 0 or step + 1 == steps:
        mean = float(np.mean(jax.device_get(losses)))
        seconds = time.time() - began
        bar.set_postfix_str(f'loss {mean:.3f}, {tokens / seconds:.0f} tokens/s')
        point = {'step': step + 1, 'loss': mean, 'tokens': tokens}
        curve.write(json.dumps(point | {'seconds': round(seconds, 1)}) + '\n')
        curve.flush()
        losses = []
      manager.save(
        step + 1,
        args=ocp.args.StandardSave({'params': params, 'optimizer': opt_state}),
        force=step + 1 == steps,
      )
  return {
    'params': params,
    'steps': steps,
    'loss': mean if first < steps else None,
    'target_tokens': tokens,
    'seconds': time.time() - began,
  }
