# SPDX-License-Identifier: Apache-2.0
"""What a job works on: a target, a draft, prompts, and how to decode them."""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any
from typing import Protocol
from typing import runtime_checkable

from etils import epath
import jax

from spec_decode import acceptance
from spec_decode import autoregressive
from spec_decode import checks
from spec_decode import randomness
from spec_decode import speculative
from spec_decode.autoregressive import Limits
from spec_decode.data import text
from spec_decode.drafts import ModelDraft
from spec_decode.language_model import Draft
from spec_decode.language_model import LanguageModel
from spec_decode.models import checkpoints
from spec_decode.models import layouts
from spec_decode.models import ngram
from spec_decode.models import transformer
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation


@runtime_checkable
class DraftSource(Protocol):
  """Where a draft comes from: a `Network` or tables."""

  name: str
  path: str | None

  def load(self) -> Any: ...

  def as_draft(self, gamma: int, sampling: Sampling) -> Draft: ...

  def problems(self, vocabulary: text.Vocabulary) -> list[str]: ...


# Of weights and of what is computed with them.
_DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class Network:
  """A network and where its weights are.

  Attributes:
    name: for tables.
    config: the sizes; `transformer.network` knows the module of its kind.
    checkpoint: path in any layout that `checkpoints.load` reads; paths that
      start with "assets/" are those of this package. None for random weights.
    vocab_size: number of real ids; 0 for all that the config has.
    layout: of the weights while decoding, see `layouts.to_layout`.
    dtype: of the weights while decoding.
    shortlist: of a draft: guess only the so many most frequent ids, 0 for all.
      The output layer, most of a small draft's work, shrinks to these.
    frequencies: n-gram tables that say which ids these are.
  """

  name: str
  config: transformer.T5Config
  checkpoint: str | None = None
  vocab_size: int = 0
  layout: str = 'fused'
  dtype: str = 'float32'
  shortlist: int = 0
  frequencies: str | None = None

  @property
  def path(self) -> str | None:
    return self.checkpoint and text.resolve(self.checkpoint)

  @functools.cached_property
  def model(self) -> LanguageModel:
    ids = ()
    if self.shortlist:
      tables = ngram.load(text.resolve(self.frequencies))
      ids = ngram.most_frequent(tables, self.shortlist)
    return transformer.language_model(
      self.config, self.vocab_size or None, self.layout, ids
    )

  def load(self) -> Any:
    """Parameters, prepared for decoding."""
    if self.path is None:
      params = transformer.initial_params(self.config, 0, self.dtype)
    else:
      params = checkpoints.load(self.path, self.config, self.dtype)
    return self.model.prepare(params)

  def as_draft(self, gamma: int, sampling: Sampling) -> ModelDraft:
    return ModelDraft(self.model, sampling, gamma)

  def target_problems(
    self, vocabulary: text.Vocabulary | None = None
  ) -> list[str]:
    """As `problems`, and what keeps it from being a target."""
    found = self.problems(vocabulary)
    if self.shortlist:
      found.append(
        f'Expected shortlist = 0 of {self.name} as the target, which decides'
        f' about every id, got {self.shortlist}. Only a draft may have one.'
      )
    return found

  def stored_problems(self) -> list[str]:
    """As `problems`, and what keeps its weights from being read."""
    found = self.problems()
    if self.path is None:
      found.append(
        f'Expected a checkpoint of {self.name}, got none. Name the one to read.'
      )
    return found

  def problems(self, vocabulary: text.Vocabulary | None = None) -> list[str]:
    """What keeps this network from being used, with a vocabulary if given."""
    found = checks.mistyped(Network, vars(self)) or checks.mistyped(
      type(self.config), vars(self.config)
    )
    if found:
      return found
    real = self.vocab_size or self.config.vocab_size
    if vocabulary is not None and vocabulary.size > real:
      found.append(
        f'Expected {self.name} to know the {vocabulary.size} ids of'
        f' {vocabulary.path}, got {real}. Choose the vocabulary it was trained'
        ' with.'
      )
    found += self._setting_problems() + self._shortlist_problems(vocabulary)
    return found + self._weight_problems(vocabulary)

  def _setting_problems(self) -> list[str]:
    found = []
    if self.layout not in layouts.LAYOUTS:
      found.append(
        f'Expected the layout of {self.name} to be one of {layouts.LAYOUTS},'
        f' got {self.layout!r}. Choose one of these.'
      )
    for name, dtype in (
      ('dtype', self.dtype),
      ('config.dtype', self.config.dtype),
    ):
      if getattr(dtype, '__name__', dtype) not in _DTYPES:
        found.append(
          f'Expected {name} of {self.name} to be one of {_DTYPES}, got'
          f' {dtype!r}. Choose one of these.'
        )
    return found

  def _shortlist_problems(
    self, vocabulary: text.Vocabulary | None
  ) -> list[str]:
    found = checks.below(0, vars(self), 'shortlist')
    if self.shortlist <= 0:
      return found
    if self.frequencies is None:
      return [
        f'Expected frequencies with the shortlist of {self.name}, got none.'
        ' Name n-gram tables, which configs/runs/count_ngrams.gin makes.'
      ]
    path = text.resolve(self.frequencies)
    try:
      size = len(ngram.load(path)['unigram'])
      counted = ngram.counted_with(path)
    except (FileNotFoundError, ValueError) as error:
      return [str(error)]
    if not self.shortlist <= size <= self.config.vocab_size:
      found.append(
        f'Expected a shortlist of {self.name} of at most the {size} ids of'
        f' {path}, these of at most {self.config.vocab_size}, got'
        f' {self.shortlist}. Lower it, or count with the vocabulary of the'
        ' network.'
      )
    if vocabulary is None:
      return found
    return found + text.vocabulary_problems(
      path, 'counted', counted, vocabulary.path, vocabulary.fingerprint
    )

  def _weight_problems(self, vocabulary: text.Vocabulary | None) -> list[str]:
    """What keeps the weights from being made, or read and used."""
    try:
      # A dtype that is none is another problem.
      config = self.config.replace(dtype='float32')
      expected = checkpoints.expected_shapes(config)
    except Exception as error:  # whatever Flax makes of the sizes
      return [
        f'Expected sizes of a network for {self.name}, got {self.config}:'
        f' {error}. Correct its config.'
      ]
    if self.path is None:
      return []
    if not epath.Path(self.path).exists():
      return [
        f'Expected a checkpoint of {self.name} at {self.path}, found nothing.'
        ' Correct the path.'
      ]
    try:
      checkpoints.check(self.path, expected)
    except Exception as error:  # Orbax and TensorStore raise many kinds
      return [f'Expected the checkpoint of {self.name}, got another: {error}']
    if vocabulary is None or not self.path.endswith('.safetensors'):
      return []
    trained = checkpoints.load_metadata(self.path).get('vocabulary')
    return text.vocabulary_problems(
      self.path, 'trained', trained, vocabulary.path, vocabulary.fingerprint
    )


@dataclasses.dataclass(frozen=True)
class Workload:
  """One configuration of decoding; every job takes one.

  Attributes:
    target: the network whose distribution the output has.
    draft: what guesses.
    prompts: what to decode.
    temperature, top_k, top_p: the target's sampling.
    gamma: guesses per block.
    draft_sampling: the draft's own; None for the target's.
    lenience: below 1 the output is no longer exact.
    max_new_tokens: length cap.
    batch_size: rows decoded together.
    seed: with an example's id it fixes the example's sample.
    mask: keep padding and ids beyond the vocabulary from being drawn.
    replay: simulate: guesses are accepted with this probability, whatever they
      are, and nothing in the text ends it. None for real decoding.
  """

  target: Network
  draft: DraftSource
  prompts: text.Prompts
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  gamma: int = 4
  draft_sampling: Sampling | None = None
  lenience: float = 1.0
  max_new_tokens: int = 64
  batch_size: int = 1
  seed: int = 0
  mask: bool = True
  replay: float | None = None

  @functools.cached_property
  def sampling(self) -> Sampling:
    size = self.prompts.tokenizer.size if self.mask else 0
    forbidden = (text.Vocabulary.pad_id,) if self.mask else ()
    return Sampling(self.temperature, self.top_k, self.top_p, size, forbidden)

  @property
  def limits(self) -> Limits:
    eos_id = text.Vocabulary.eos_id if self.replay is None else -1
    return Limits(self.max_new_tokens, eos_id)

  @property
  def verify(self) -> Any:
    if self.replay is None:
      return acceptance.verify
    return acceptance.Replayed(self.replay)

  @functools.cached_property
  def params(self) -> tuple[Any, Any]:
    """Prepared parameters of target and draft."""
    return self.target.load(), self.draft.load()

  def speculation(
    self, gamma: int | None = None, measure_beta: bool = False
  ) -> Speculation:
    return Speculation(
      self.target.model,
      self.draft.as_draft(
        self.gamma if gamma is None else gamma,
        self.draft_sampling or self.sampling,
      ),
      self.sampling,
      self.limits,
      self.lenience,
      measure_beta,
      self.verify,
    )

  def keys(self, batch: text.Batch) -> jax.Array:
    return randomness.row_keys(self.seed, batch.ids)

  def start(self, batch: text.Batch, config: Speculation | None = None):
    """What both models make of one batch's inputs: `speculative.Caches`."""
    config = config or self.speculation()
    return speculative.start(config, *self.params, batch.inputs, batch.prompt)

  def decode(
    self, batch: text.Batch, config: Speculation | None = None, caches=None
  ):
    """One batch with speculation: `speculative.Result`.

    Args:
      batch: what to decode.
      config: default `speculation()`.
      caches: from `start`, with the same config; made anew by default.
    """
    config = config or self.speculation()
    caches = caches or self.start(batch, config)
    return speculative.decode_from(
      config, *self.params, caches, self.keys(batch), batch.prompt
    )

  def start_plain(self, batch: text.Batch):
    """The target's cache of one batch."""
    return autoregressive.start(
      self.target.model, self.limits, self.params[0], batch.inputs, batch.prompt
    )

  def decode_plain(self, batch: text.Batch, cache=None):
    """One batch without: `autoregressive.Result`; cache from `start_plain`."""
    return autoregressive.decode_from(
      self.target.model,
      self.sampling,
      self.limits,
      self.params[0],
      self.start_plain(batch) if cache is None else cache,
      self.keys(batch),
      batch.prompt,
    )

  def batches(self) -> Iterator[text.Batch]:
    return self.prompts.batches(self.batch_size)

  def _check_lengths(self) -> None:
    """Whether each network holds a prompt, what follows and a block."""
    prompt = self.prompts.width + 1 if self.prompts.continued else 1
    length = prompt + self.max_new_tokens + speculative.block_room(self.gamma)
    for network in (self.target, self.draft):
      if isinstance(network, Network):
        network.config.check_length(length)

  def problems(self) -> list[str]:
    """Everything that would stop a job, found before anything compiles."""
    wrong = checks.mistyped(Workload, vars(self))
    found = wrong + self._part_problems()
    if not wrong:
      found += self._setting_problems()
    if not found:
      # What target and draft must have in common, and their prompts.
      try:
        self.speculation()
        self._check_lengths()
      except ValueError as error:
        found.append(str(error))
    return found

  def _part_problems(self) -> list[str]:
    """Of prompts, target and draft, as far as they are such."""
    if not isinstance(self.prompts, text.Prompts):
      return []
    found = self.prompts.problems()
    if checks.mistyped(text.Prompts, vars(self.prompts)):
      return found
    try:
      vocabulary = self.prompts.tokenizer
    except (FileNotFoundError, ValueError) as error:
      return list(dict.fromkeys([*found, str(error)]))
    if isinstance(self.target, Network):
      found += self.target.target_problems(vocabulary)
    if hasattr(self.draft, 'problems'):
      found += self.draft.problems(vocabulary)
    return found

  def _setting_problems(self) -> list[str]:
    found = []
    encodes = getattr(self.target.config, 'num_encoder_layers', 0) != 0
    if encodes == bool(self.prompts.continued):
      found.append(
        f'Expected prompts that {self.target.name} reads, got ones for'
        f' {"the decoder alone" if encodes else "an encoder"}. Set'
        f' text.Prompts.continued = {None if encodes else "targets"!r}.'
      )
    for build in (
      lambda: self.limits,
      lambda: Sampling(self.temperature, self.top_k, self.top_p),
      lambda: self.verify,
    ):
      try:
        build()
      except ValueError as error:
        found.append(str(error))
    if not 0 < self.lenience <= 1:
      found.append(
        f'Expected lenience in (0, 1], got {self.lenience}. 1 is exact.'
      )
    found += checks.below(0, vars(self), 'gamma')
    return found + checks.below(1, vars(self), 'batch_size')
