# SPDX-License-Identifier: Apache-2.0
"""A target and a draft as one T5X model, for `t5x.infer` and `t5x.eval`.

The parameters are {'target': ..., 'draft': ...}; each half keeps the names,
shapes and axes that T5X gives it, and comes from its own checkpoint. Decoding
is the loop of `speculative`.

Unlike stock T5X: a row's sample depends on the seed, its inputs and which of
the row's decodes it is, not on T5X's random keys, so batches, shards and
restarts change nothing and equal inputs have equal samples. Scores are what
score mode gives, also at temperature 0, where stock reports 0.

Shape letters: B rows, I input length, L target length, N decodes per row,
G guesses (gamma).
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from etils import epath
from flax import traverse_util
from flax.core import freeze
from flax.core import unfreeze
from flax.linen.partitioning import AxisMetadata
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from sentencepiece import sentencepiece_model_pb2
import seqio
from t5x import models
from t5x import utils

from spec_decode import drafts
from spec_decode import randomness
from spec_decode import speculative
from spec_decode.autoregressive import Limits
from spec_decode.data import text
from spec_decode.language_model import Draft
from spec_decode.models import ngram
from spec_decode.models import transformer
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class NetworkDraft:
  """A smaller T5 as the draft.

  Attributes:
    module: the network.
    vocabulary: the one it was trained with, to be compared with the target's.
    axis_prefix: goes before the names of its axes. Rules for these names then
      shard it unlike the target, as a draft must be whose heads the model axis
      of the mesh does not divide.
    shortlist: guess only the so many most frequent ids; 0 for all. The output
      layer, most of a small draft's work, shrinks to these.
    frequencies: n-gram tables that say which ids these are.
  """

  module: transformer.Transformer
  vocabulary: seqio.Vocabulary
  axis_prefix: str = ''
  shortlist: int = 0
  frequencies: str | None = None

  def __post_init__(self):
    if self.shortlist and self.frequencies is None:
      raise ValueError(
        f'Expected frequencies with the shortlist of {self.shortlist} ids, got'
        ' none. Name n-gram tables, which configs/runs/count_ngrams.gin makes.'
      )

  def check_vocabulary(self, vocabulary: seqio.Vocabulary) -> None:
    if content(self.vocabulary) != content(vocabulary):
      raise ValueError(
        'Expected target and draft to have one vocabulary, got'
        f' {vocabulary} and {self.vocabulary}.'
      )
    if self.shortlist:
      _check_counted(text.resolve(self.frequencies), vocabulary)

  def initial_variables(self, rng, input_shapes, input_types) -> Any:
    """Fresh parameters and the names of their axes."""
    model = models.EncoderDecoderModel(
      self.module, self.vocabulary, self.vocabulary, None
    )
    variables = model.get_initial_variables(rng, input_shapes, input_types)
    rename = lambda x: x.replace(
      names=PartitionSpec(*(self.axis_prefix + name for name in x.names))
    )
    axes = jax.tree.map(
      rename,
      unfreeze(variables['params_axes']),
      is_leaf=lambda x: isinstance(x, AxisMetadata),
    )
    return {'params': variables['params'], 'params_axes': axes}

  def as_draft(self, gamma: int, sampling: Sampling, vocab_size: int) -> Draft:
    ids = ()
    if self.shortlist:
      tables = ngram.load(text.resolve(self.frequencies))
      ids = ngram.most_frequent(tables, self.shortlist)
    config = self.module.config
    model = transformer.language_model(config, vocab_size, shortlist=ids)
    return drafts.ModelDraft(model, sampling, gamma)


@dataclasses.dataclass(frozen=True)
class NGramDraft:
  """N-gram tables as the draft; they stand on every device.

  Attributes:
    path: of a file that `ngram.save` wrote, the manager's `draft_path`. The
      vocabulary that it names, if any, is compared with the target's.
  """

  path: str

  def check_vocabulary(self, vocabulary: seqio.Vocabulary) -> None:
    _check_counted(self.path, vocabulary)

  def initial_variables(self, rng, input_shapes, input_types) -> Any:
    """The tables and the names, none, of their axes."""
    del rng, input_shapes, input_types
    params = jax.tree.map(jnp.asarray, ngram.load(self.path))
    axes = {
      f'{name}_axes': AxisMetadata(PartitionSpec(*[None] * x.ndim))
      for name, x in traverse_util.flatten_dict(params, sep='/').items()
    }
    return {
      'params': params,
      'params_axes': traverse_util.unflatten_dict(axes, sep='/'),
    }

  def as_draft(self, gamma: int, sampling: Sampling, vocab_size: int) -> Draft:
    return drafts.NGramDraft(vocab_size, sampling, gamma)


class SpeculativeEncoderDecoderModel(models.EncoderDecoderModel):
  """Decodes speculatively wherever T5X takes an encoder-decoder model.

  Args:
    module: the target's network.
    input_vocabulary: as in T5X.
    output_vocabulary: as in T5X.
    draft: what guesses.
    gamma: guesses per block.
    temperature: 0 is argmax.
    top_k: 0 for all ids.
    top_p: 1 for all ids.
    draft_sampling: the draft's own; None for the target's.
    lenience: l of appendix A.5; below 1 the output is no longer exact.
    seed: of all samples.
    mask: keep padding and ids beyond the vocabulary from being drawn, which
      stock T5X does not.
    layout: of the target's kernels while decoding, see `layouts.to_layout`;
      'fused' pays on a CPU.
    prompt_with_targets: continue the targets instead of decoding from nothing.
    num_decodes: samples per row.
    return_all_decodes: all of them instead of the one with the best score.
    optimizer_def: as in T5X; inference needs none.
    **kwargs: further arguments of `models.EncoderDecoderModel`, but for those
      that say how it decodes.
  """

  def __init__(
    self,
    module: transformer.Transformer,
    input_vocabulary: seqio.Vocabulary,
    output_vocabulary: seqio.Vocabulary,
    draft: NetworkDraft | NGramDraft,
    gamma: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    draft_sampling: Sampling | None = None,
    lenience: float = 1.0,
    seed: int = 0,
    mask: bool = False,
    layout: str = 'checkpoint',
    prompt_with_targets: bool = False,
    num_decodes: int = 1,
    return_all_decodes: bool = False,
    optimizer_def: Any = None,
    **kwargs,
  ):
    for name in ('decode_fn', 'default_decoder_params'):
      if name in kwargs:
        raise ValueError(
          f'Expected no {name}, which is for one network, got {kwargs[name]}.'
          ' Both decode by the arguments of this model, such as temperature,'
          ' top_k and num_decodes; there is no beam search.'
        )
    if num_decodes < 1:
      raise ValueError(
        f'Expected num_decodes to be at least 1, got {num_decodes}.'
      )
    super().__init__(
      module, input_vocabulary, output_vocabulary, optimizer_def, **kwargs
    )
    self.draft = draft
    self._seed = seed
    self._prompt_with_targets = prompt_with_targets
    self._num_decodes = num_decodes
    self._return_all_decodes = return_all_decodes
    size = output_vocabulary.vocab_size
    sampling = Sampling(
      temperature,
      top_k,
      top_p,
      vocab_size=size if mask else 0,
      forbidden=(0,) if mask else (),
    )
    self._check(module, draft, output_vocabulary)
    self.speculation = Speculation(
      transformer.language_model(module.config, size, layout),
      draft.as_draft(gamma, draft_sampling or sampling, size),
      sampling,
      Limits(1, output_vocabulary.eos_id or 1),
      lenience,
    )

  @staticmethod
  def _check(module, draft, vocabulary) -> None:
    networks = {'module': module}
    if isinstance(draft, NetworkDraft):
      networks['draft.module'] = draft.module
    for name, network in networks.items():
      if not isinstance(network, transformer.Transformer):
        raise ValueError(
          f'Expected {name} to be spec_decode.models.transformer.Transformer,'
          f' got {type(network)}. Networks of T5X take one token per call; give'
          ' their config to this one, whose parameters are the same.'
        )
      if network.config.vocab_size < vocabulary.vocab_size:
        raise ValueError(
          f'Expected {name} to know the {vocabulary.vocab_size} ids of'
          f' {vocabulary}, got {network.config.vocab_size}.'
        )
    draft.check_vocabulary(vocabulary)

  def get_initial_variables(
    self, rng: Array, input_shapes: Mapping, input_types: Mapping | None = None
  ) -> Any:
    """The variables of both, each collection as {'target', 'draft'}."""
    arguments = rng, input_shapes, input_types
    target = super().get_initial_variables(*arguments)
    draft = self.draft.initial_variables(*arguments)
    return freeze(
      {
        collection: {'target': target[collection], 'draft': draft[collection]}
        for collection in ('params', 'params_axes')
      }
    )

  def _compute_logits(self, params: Any, *args, **kwargs) -> Any:
    """The target's alone: scores and losses are as in T5X."""
    return super()._compute_logits(params['target'], *args, **kwargs)

  def predict_batch_with_aux(
    self,
    params: Any,
    batch: Mapping[str, Array],
    rng: Array | None = None,
    decoder_params: Mapping[str, Any] | None = None,
    return_all_decodes: bool | None = None,
    num_decodes: int | None = None,
    prompt_with_targets: bool | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Decodes a batch; arguments as in T5X, `rng` is not used.

    Returns:
      Tokens [B, L], or [B, N, L] for all decodes in the order of their scores,
      prompts included; and, with the same leading axes,
        scores: log-probabilities of the new tokens at temperature 1.
        speculative: num_tokens, target_calls, drawn, tested and accepted
          guesses, and a histogram [..., G + 1] of accepted guesses per call,
          see `speculative.Result`.
    """
    del rng
    if decoder_params:
      raise ValueError(
        f'Expected no decoder_params, got {sorted(decoder_params)}: how to'
        ' sample is set where the model is made.'
      )
    count = num_decodes or self._num_decodes
    everything = (
      self._return_all_decodes
      if return_all_decodes is None
      else return_all_decodes
    )
    prompted = (
      self._prompt_with_targets
      if prompt_with_targets is None
      else prompt_with_targets
    )
    state, result = self._decode(params, batch, count, prompted)
    length = batch['decoder_input_tokens'].shape[1]
    fields = ('target_calls', 'drawn', 'tested', 'accepted', 'histogram')
    counts = {name: getattr(result, name) for name in fields}
    outputs = (
      state.sequences.tokens[:, 1 : length + 1],
      {
        'scores': jnp.sum(result.log_probs, axis=1),
        'speculative': {'num_tokens': result.length, **counts},
      },
    )
    outputs = jax.tree.map(
      lambda x: x.reshape(-1, count, *x.shape[1:]), outputs
    )
    order = jnp.argsort(outputs[1]['scores'], axis=1)
    rows = jnp.arange(order.shape[0])[:, None]
    chosen = order if everything else order[:, -1]
    return jax.tree.map(
      lambda x: x[rows if everything else rows[:, 0], chosen], outputs
    )

  def _decode(self, params, batch, count: int, prompted: bool):
    """The finished loop over `count` copies of each row."""
    inputs = batch['encoder_input_tokens']
    targets = batch['decoder_input_tokens']
    rows = inputs.shape[0]

    def copies(x):
      # Caches have several entries per row, one for each head.
      x = x.reshape(rows, -1, *x.shape[1:])
      return jnp.repeat(x, count, axis=0).reshape(-1, *x.shape[2:])

    keys = randomness.row_keys(self._seed, randomness.hash_ids(inputs))
    keys = jax.vmap(jax.random.fold_in)(
      jnp.repeat(keys, count), jnp.arange(rows * count) % count
    )
    length, prompt = targets.shape[1], None
    limits = self.speculation.limits
    limits = dataclasses.replace(limits, max_new_tokens=length)
    config = dataclasses.replace(self.speculation, limits=limits)
    if prompted:
      # As T5X: up to the first padding, the EOS not counted.
      real = (targets[:, 1:] != 0) & (targets[:, 1:] != limits.eos_id)
      given = jnp.sum(jnp.cumprod(real, axis=1), axis=1, dtype=jnp.int32)
      prompt = targets, given + 1
    target = config.target.prepare(params['target'])
    draft = config.draft.prepare(params['draft'])
    # The inputs are encoded once for all decodes.
    caches = speculative.start(config, target, draft, inputs, prompt)
    caches, prompt = jax.tree.map(copies, (caches, prompt))
    state = speculative.init(config, target, caches, keys, prompt)
    # In T5X the length bounds the prompt, its start id apart, and what follows.
    limit = jnp.full_like(state.sequences.limit, length + 1)
    state = state.replace(sequences=state.sequences.replace(limit=limit))
    state = speculative.finish(config, target, draft, state)
    return state, speculative.result(config, state)


def _check_counted(path: str, vocabulary: seqio.Vocabulary) -> None:
  """Raises ValueError for tables that were counted with another vocabulary."""
  counted = ngram.counted_with(path)
  used = str(vocabulary)
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    # Of the file, since tables are counted by `text.Vocabulary`.
    file = epath.Path(vocabulary.sentencepiece_model_file)
    fingerprint = text.fingerprint(file.read_bytes(), vocabulary.extra_ids)
  else:
    fingerprint = used
  found = text.vocabulary_problems(path, 'counted', counted, used, fingerprint)
  if found:
    raise ValueError(*found)


def content(vocabulary: seqio.Vocabulary) -> Any:
  """What two copies of one vocabulary have in common, wherever they lie.

  Of a SentencePiece model these are its pieces by id, whether its extra ids
  stand in its file, as in T5X's, or are added to it, as by T5's tasks.
  """
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    model = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.sp_model)
    return [piece.piece for piece in model.pieces]
  return vocabulary


def verify_vocabularies(dataset_cfg: utils.DatasetConfig, model: Any) -> None:
  """For `infer.verify_matching_vocabs_fn`; T5X's own compares paths.

  Raises:
    ValueError: the task has other vocabularies than the model.
  """
  task = utils.get_vocabulary(dataset_cfg)
  mine = model.input_vocabulary, model.output_vocabulary
  for name, theirs, ours in zip(('input', 'output'), task, mine):
    if content(theirs) != content(ours):
      raise ValueError(
        f'Expected task {dataset_cfg.mixture_or_task_name} and model to have'
        f' one {name} vocabulary, got {theirs} and {ours}.'
      )
