# SPDX-License-Identifier: Apache-2.0
"""Every gin file for T5X is parsed and bound; the shipped one is run."""

import csv
import functools
import json
import pathlib
import re
import shlex
import sys
import types

from flax import traverse_util
import gin
import jax
import numpy as np
import pytest
import seqio
from t5x import decoding
from t5x import eval as t5x_eval
from t5x import infer
from t5x import models
from t5x.examples.t5 import network

from spec_decode import configuration
from spec_decode import experiment
from spec_decode import run
from spec_decode import workload
from spec_decode.data import text
from spec_decode.models import checkpoints
from spec_decode.models import ngram
from spec_decode.models import t5x_model
from spec_decode.models import transformer

ROOT = pathlib.Path(__file__).parents[1]
RUNS = sorted((ROOT / 'configs' / 'runs').glob('t5x_infer_*.gin'))
PARTS = ROOT / 'configs' / 't5x'
TARGETS = sorted(path.stem for path in PARTS.glob('target_*.gin'))
DRAFTS = sorted(path.stem for path in PARTS.glob('draft_*.gin'))
VOCABULARY = seqio.SentencePieceVocabulary(
  str(text.ASSETS / 'debian' / 'vocab.model')
)
# What has no value in the files, and what would be read from gs://.
REQUIRED = [
  f"{name} = '/nowhere/checkpoint_1'"
  for name in (
    'CHECKPOINT_PATH',
    'DRAFT_CHECKPOINT_PATH',
    'INFER_OUTPUT_DIR',
  )
]
VOCABULARY_FILE = (
  'seqio.SentencePieceVocabulary.sentencepiece_model_file ='
  f" '{text.ASSETS / 'debian' / 'vocab.model'}'"
)


@pytest.fixture(autouse=True)
def _fresh_gin(monkeypatch):
  monkeypatch.chdir(ROOT)
  gin.clear_config()
  yield
  gin.clear_config()


def _recorder(function):
  """Has the name of T5X's function and returns what it is called with."""
  return functools.wraps(function)(lambda **arguments: arguments)


# One of each: gin remembers them from file to file.
INFER, EVALUATE = _recorder(infer.infer), _recorder(t5x_eval.evaluate)


def parse(files, bindings, monkeypatch):
  """Parses as a program of T5X would."""
  for name, function in (('infer', INFER), ('evaluate', EVALUATE)):
    monkeypatch.setattr(sys.modules['__main__'], name, function, raising=False)
  paths = ['.', *configuration.t5x_search_paths()]
  configuration.parse(list(files), list(bindings), paths)


def bound(files, bindings, monkeypatch):
  """What `t5x.infer.infer` would be called with."""
  parse(files, bindings, monkeypatch)
  return gin.get_configurable(INFER)()


@functools.cache
def variables(network_of, config):
  """Names -> shapes, and names -> axes, of a network of T5X or ours."""
  model = models.EncoderDecoderModel(network_of(config), None, None, None)
  shapes = {'encoder_input_tokens': (1, 2), 'decoder_input_tokens': (1, 2)}
  init = functools.partial(model.get_initial_variables, input_shapes=shapes)
  made = jax.eval_shape(init, jax.random.key(0))
  flat = lambda tree: traverse_util.flatten_dict(dict(tree), sep='/')
  params = {k: (x.shape, x.dtype) for k, x in flat(made['params']).items()}
  return params, {k: x.names for k, x in flat(made['params_axes']).items()}


def size(config):
  params, _ = variables(transformer.Transformer, config)
  return sum(np.prod(shape, dtype=np.int64) for shape, _ in params.values())


def published(path):
  """The row of table 2 that a run file serves."""
  _, _, task, draft, temperature = path.stem.split('_')
  with open(ROOT / 'experiments' / 'paper' / 'table2_walltime.csv') as file:
    for row in csv.DictReader(file):
      if (row['task'].lower(), row['draft'], row['temperature']) == (
        task,
        f'T5-{draft}',
        temperature.removeprefix('t'),
      ):
        return row


@pytest.mark.parametrize('path', RUNS, ids=lambda path: path.stem)
def test_runs_bind_what_their_headers_say(path, monkeypatch):
  files, bindings = [str(path.relative_to(ROOT))], list(REQUIRED)
  shipped = path.stem == 't5x_infer_debian'
  if not shipped:
    bindings.append(VOCABULARY_FILE)
  arguments = bound(files, bindings, monkeypatch)
  configuration.refuse_idle_names(INFER)
  model = arguments['model']
  assert isinstance(model, t5x_model.SpeculativeEncoderDecoderModel)
  config = model.module.config
  header = path.read_text().partition('\nfrom')[0].replace('\n#', '')
  assert f'--gin_file=configs/runs/{path.name}' in header
  expected = {'temperature': 0.0, 'gamma': 3}
  if not shipped:
    assert 'partitioning.PjitPartitioner.num_partitions=N' in header
    row = published(path)
    expected = {key: float(row[key]) for key in expected}
    for figure in (
      f'{row["task"]}, {row["draft"]}',
      f'temperature {row["temperature"]}',
      f'alpha {row["alpha"].rstrip("0")}',
      f'{row["speed"]} times faster',
    ):
      assert figure in header or figure.replace('alpha ', '') in header
    assert size(config) == 11_135_332_352
    assert (
      round(size(model.draft.module.config) / 1e6)
      == {
        'T5-small': 77,
        'T5-base': 248,
        'T5-large': 783,
      }[row['draft']]
    )
  assert model.speculation.sampling.temperature == expected['temperature']
  assert model.speculation.draft.gamma == expected['gamma']
  manager = arguments['restore_checkpoint_cfg'].checkpoint_manager_cls
  state = manager('', None, None)  # bound by gin: the draft's path is there
  assert state.draft_path == '/nowhere/checkpoint_1'


@pytest.mark.parametrize('batch_size', [1, 6])
@pytest.mark.parametrize('program', ['infer', 'eval'])
def test_a_batch_that_the_data_axis_does_not_divide_is_refused(
  batch_size, program, monkeypatch
):
  """As these files have it on four devices, before anything is restored."""
  if program == 'infer':
    arguments = bound(
      ['configs/runs/t5x_infer_ende_small_t0.gin'],
      [*REQUIRED, VOCABULARY_FILE],
      monkeypatch,
    )
  else:
    arguments = evaluation(monkeypatch)
  four = types.SimpleNamespace(
    data_mesh_size=4, mesh=types.SimpleNamespace(size=4)
  )
  message = f'4, divides, got {batch_size}'
  with pytest.raises(ValueError, match=message) as error:
    arguments['train_state_initializer_cls'](
      input_shapes={'encoder_input_tokens': (batch_size, 8)}, partitioner=four
    )
  # The remedy is one that T5X's files take.
  remedy = 'partitioning.PjitPartitioner.num_partitions'
  assert f'--gin.{remedy}=4' in str(error.value)
  gin.clear_config()
  parse(
    ['configs/runs/t5x_infer_ende_small_t0.gin'],
    [*REQUIRED, f'{remedy} = 4'],
    monkeypatch,
  )
  assert gin.query_parameter(remedy) == 4


def test_the_commands_of_the_readme_are_whole(monkeypatch):
  """They parse, and every flag has an effect."""
  (section,) = re.findall(
    r'\n## With T5X\n.*?(?=\n## )', (ROOT / 'README.md').read_text(), re.DOTALL
  )
  script = section.replace('\\\n', ' ')
  commands = [
    shlex.split(line)[3:]
    for line in script.splitlines()
    if line.startswith('python -m spec_decode.run --gin_file=configs/runs/t5x_')
  ]
  assert len(commands) == 3
  for flags in commands:
    gin.clear_config()
    files = [flag.partition('=')[2] for flag in flags if '--gin_file=' in flag]
    bindings = [flag[6:] for flag in flags if flag.startswith('--gin.')]
    assert len(files) + len(bindings) == len(flags)
    parse(files, bindings, monkeypatch)
    configuration.refuse_idle_names(INFER)
  # Other devices, another mesh.
  (mesh,) = re.findall(r'```\n(--gin.*?)```', section, re.DOTALL)
  more = [flag.removeprefix('--gin.') for flag in shlex.split(mesh)]
  gin.clear_config()
  parse(files, bindings + more, monkeypatch)
  tile = gin.query_parameter(more[-1].partition('=')[0])
  assert tile == (2, 2, 1, 1)
  assert gin.query_parameter(more[0].partition('=')[0]) is None


def test_every_row_of_the_table_has_a_run():
  with open(ROOT / 'experiments' / 'paper' / 'table2_walltime.csv') as file:
    rows = list(csv.DictReader(file))
  served = [published(p) for p in RUNS if p.stem != 't5x_infer_debian']
  assert len(served) == len(rows) == 12
  assert all(row in served for row in rows)


@pytest.mark.parametrize('number', range(max(len(TARGETS), len(DRAFTS))))
def test_every_size_has_the_tree_and_axes_of_t5x(number, monkeypatch):
  target = TARGETS[number % len(TARGETS)]
  draft = DRAFTS[number % len(DRAFTS)]
  if draft == 'draft_ngram':
    draft = 'draft_1_1_small'
  base = RUNS[0].relative_to(ROOT)
  files = [base, *(f'configs/t5x/{name}.gin' for name in (target, draft))]
  # The shortlists of the shipped drafts are of the shipped vocabulary.
  whole = 't5x_model.NetworkDraft.shortlist = 0'
  bindings = REQUIRED + [VOCABULARY_FILE, whole]
  model = bound(map(str, files), bindings, monkeypatch)['model']
  for name, config in (
    (target, model.module.config),
    (draft, model.draft.module.config),
  ):
    # Layers are alike: all of them are compared for the largest only.
    few = config.replace(num_encoder_layers=2, num_decoder_layers=2)
    compared = config if name == 'target_1_1_xxl' else few
    ours = variables(transformer.Transformer, compared)
    assert ours == variables(network.Transformer, compared)
    header = (PARTS / f'{name}.gin').read_text().partition('\nfrom')[0]
    # Beside the shipped networks it has their vocabulary.
    if 'debian' not in name and config.vocab_size == 32128:
      assert f'{round(size(config) / 1e6):,} M parameters' in header


def evaluation(monkeypatch):
  """What `t5x.eval.evaluate` would be called with."""
  names = ('eval', 'target_1_0_base', 'draft_1_0_small', 'task_ende')
  parse(
    [f'configs/t5x/{name}.gin' for name in names],
    [
      *REQUIRED[:2],
      "EVAL_OUTPUT_DIR = '/nowhere'",
      'TEMPERATURE = 0.0',
      'GAMMA = 7',
      VOCABULARY_FILE,
    ],
    monkeypatch,
  )
  configuration.refuse_idle_names(EVALUATE)
  return gin.get_configurable(EVALUATE)()


def test_evaluation_binds_too(monkeypatch):
  arguments = evaluation(monkeypatch)
  assert arguments['model'].speculation.draft.gamma == 7
  manager = arguments['restore_checkpoint_cfg'].checkpoint_manager_cls
  assert manager('', None, None).draft_path == '/nowhere/checkpoint_1'


@pytest.mark.parametrize('run', ['infer', 'eval'])
def test_models_name_the_vocabulary_of_the_papers_tasks(run, monkeypatch):
  """The name that T5X compares, with sizes included last as in the README."""
  for task in ('ende', 'cnndm'):
    gin.clear_config()
    names = (run, f'task_{task}', 'draft_1_1_small', 'target_1_0_11b')
    bindings = [*REQUIRED, "EVAL_OUTPUT_DIR = '/nowhere'"]
    bindings += ['TEMPERATURE = 0.0', 'GAMMA = 7']
    parse([f'configs/t5x/{name}.gin' for name in names], bindings, monkeypatch)
    name = gin.query_parameter('MIXTURE_OR_TASK_NAME/gin.macro.value')
    features = seqio.get_mixture_or_task(name).output_features
    # Not read, which would take a network.
    ours = gin.get_configurable(seqio.SentencePieceVocabulary)()
    for side in ('inputs', 'targets'):
      assert features[side].vocabulary == ours


@pytest.mark.parametrize(
  'binding, message',
  [
    ('drafft/network.T5Config.emb_dim = 3', 'Did you mean draft/'),
    ('GAMA = 7', 'GAMA is bound.*Did you mean GAMMA'),
    ('TEMPRATURE = 1.0', 'Did you mean TEMPERATURE'),
    ("CHECKPOINT_PAHT = '/x'", 'Did you mean CHECKPOINT_PATH'),
  ],
)
def test_mistyped_names_are_refused(binding, message, monkeypatch):
  bindings = [*REQUIRED, binding]
  parse(['configs/runs/t5x_infer_debian.gin'], bindings, monkeypatch)
  with pytest.raises(configuration.ConfigError, match=message):
    configuration.refuse_idle_names(INFER)


def test_all_that_has_no_value_is_named_at_once(monkeypatch):
  with pytest.raises(configuration.ConfigError) as error:
    parse(['configs/runs/t5x_infer_ende_small_t0.gin'], [], monkeypatch)
  for name in ('CHECKPOINT_PATH', 'DRAFT_CHECKPOINT_PATH', 'INFER_OUTPUT_DIR'):
    assert f'--gin.{name}=' in str(error.value)


def test_n_gram_tables_are_chosen_by_a_file(tmp_path, monkeypatch):
  path = str(tmp_path / 'tables.safetensors')
  fingerprint = text.Vocabulary().fingerprint
  ngram.save(path, ngram.count([[1]], 8, 1), {'vocabulary': fingerprint})
  files = ['configs/runs/t5x_infer_debian.gin', 'configs/t5x/draft_ngram.gin']
  bindings = [*REQUIRED, f"DRAFT_CHECKPOINT_PATH = '{path}'"]
  draft = bound(files, bindings, monkeypatch)['model'].draft
  assert draft == t5x_model.NGramDraft(path)
  # The network whose place it takes is still bound.
  configuration.refuse_idle_names(INFER)


def test_decodes_per_row_are_an_argument_of_the_model(monkeypatch):
  model = 't5x_model.SpeculativeEncoderDecoderModel'
  bindings = [
    *REQUIRED, f'{model}.num_decodes = 3', f'{model}.return_all_decodes = True'
  ]  # fmt: skip
  files = ['configs/runs/t5x_infer_debian.gin']
  model = bound(files, bindings, monkeypatch)['model']
  names = ('encoder_input_tokens', 'decoder_input_tokens')
  shapes = dict.fromkeys(names, (2, 4))
  init = functools.partial(model.get_initial_variables, input_shapes=shapes)
  params = jax.eval_shape(init, jax.random.key(0))['params']
  batch = dict.fromkeys(names, jax.ShapeDtypeStruct((2, 4), 'int32'))
  made, _ = jax.eval_shape(model.predict_batch_with_aux, params, batch)
  assert made.shape == (2, 3, 4)


def test_a_draft_of_another_vocabulary_is_refused(monkeypatch):
  bindings = [
    *REQUIRED,
    VOCABULARY_FILE,
    'DRAFT_VOCABULARY = @draft/seqio.SentencePieceVocabulary()',
    'draft/seqio.SentencePieceVocabulary.extra_ids = 50',
  ]
  target, draft = (
    seqio.SentencePieceVocabulary(VOCABULARY.sentencepiece_model_file, extra)
    for extra in (100, 50)
  )
  with pytest.raises(ValueError, match='one vocabulary') as error:
    bound([str(RUNS[0].relative_to(ROOT))], bindings, monkeypatch)
  assert f'got {target} and {draft}' in str(error.value)


def test_the_shipped_pair_decodes_as_stock_and_the_workload_do(
  tmp_path, monkeypatch
):
  """64 held-out examples through the gin files, to the token."""
  length, folder = 12, tmp_path / 'out'
  configuration.parse(
    ['configs/runs/convert_to_t5x.gin'], [f"OUTPUT_DIR = '{tmp_path}'"], ['.']
  )
  written = gin.get_configurable(experiment.run)()['results']['convert']
  gin.clear_config()

  arguments = bound(
    ['configs/runs/t5x_infer_debian.gin'],
    [
      f"CHECKPOINT_PATH = '{written['target']['written']}'",
      f"DRAFT_CHECKPOINT_PATH = '{written['draft']['written']}'",
      f"INFER_OUTPUT_DIR = '{folder}'",
      f"TASK_FEATURE_LENGTHS = {{'inputs': 64, 'targets': {length}}}",
      'utils.DatasetConfig.batch_size = 32',
    ],
    monkeypatch,
  )
  infer.infer(**arguments)
  (path,) = folder.glob('*.jsonl-00000-of-00001')
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  got = text.pad([line['prediction_tokens'] for line in lines], length)

  config = arguments['model'].module.config
  stock = models.EncoderDecoderModel(
    network.Transformer(config),
    VOCABULARY,
    VOCABULARY,
    None,
    functools.partial(decoding.temperature_sample, temperature=0.0),
  )
  gin.clear_config()
  configuration.parse(
    ['configs/runs/quickstart.gin'],
    [
      'NUM_EXAMPLES = 64',
      f'MAX_NEW_TOKENS = {length}',
      'text.Prompts.input_length = 64',
    ],
    ['.'],
  )
  ours = gin.get_configurable(workload.Workload)()
  (batch,) = ours.prompts.batches(64)
  want = jax.jit(stock.predict_batch)(
    checkpoints.load(written['target']['written'], config),
    {
      'encoder_input_tokens': batch.inputs,
      'decoder_input_tokens': np.zeros((64, length), np.int32),
    },
  )
  np.testing.assert_array_equal(got, want)
  # The networks as they ship, before their conversion, without T5X.
  result = ours.decode(batch)
  np.testing.assert_array_equal(got, result.tokens)
  counts = [line['aux']['speculative'] for line in lines]
  for name in ('accepted', 'tested', 'target_calls'):
    found = [count[name] for count in counts]
    np.testing.assert_array_equal(found, getattr(result, name), name)
  assert sum(count['accepted'] for count in counts) > 64


def small_job(name, tmp_path, *bindings):
  """The result of a job on random weights of a moment's size."""
  halves = [
    f'{half}/{binding}'
    for half in ('target', 'draft')
    for binding in (
      'workload.Network.checkpoint = None',
      'transformer.T5Config.num_encoder_layers = 1',
      'transformer.T5Config.num_decoder_layers = 1',
    )
  ]
  configuration.parse(
    [f'configs/runs/{name}.gin'],
    [
      f"OUTPUT_DIR = '{tmp_path}'",
      'experiment.run.record_path = None',
      'MAX_NEW_TOKENS = 6',
      'text.Prompts.input_length = 16',
      *halves,
      *bindings,
    ],
    ['.'],
  )
  return gin.get_configurable(experiment.run)()['results'][name]


def test_agreement_with_stock(tmp_path):
  found = small_job('t5x_agreement', tmp_path, 'NUM_EXAMPLES = 8')
  assert (found['examples'], found['identical']) == (8, 8)
  gin.clear_config()
  found = small_job(
    't5x_agreement', tmp_path, 'NUM_EXAMPLES = 8', "DTYPE = 'bfloat16'"
  )
  # Where they part, stock's own logits were close.
  assert found['identical'] == 8 - len(found['logit_gaps'])
  assert all(abs(gap) < 0.1 for gap in found['logit_gaps'])


def test_walltime_of_four_decoders(tmp_path):
  found = small_job(
    't5x_walltime',
    tmp_path,
    'NUM_EXAMPLES = 2',
    't5x_walltime.measure.repeats = 1',
  )
  assert found['examples'] == 2
  assert found['differing_outputs'] == 0
  assert len(set(found['tokens'].values())) == 1
  names = ['stock', 'stock_gather', 'plain', 'speculative']
  assert list(found['ms_per_token']) == names
  assert found['speedup_over_stock']['stock'] == 1


def test_a_program_finds_the_entry_points_of_t5x():
  assert run.infer is infer.infer
  with pytest.raises(AttributeError):
    run.no_such_thing  # noqa: B018
