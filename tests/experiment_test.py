# SPDX-License-Identifier: Apache-2.0
"""The command line: every value works or is refused before work starts."""

import json
import math
import pathlib
import subprocess
import sys

import gin
import pytest
import tiny

from spec_decode import configuration
from spec_decode import experiment
from spec_decode import records

ROOT = pathlib.Path(__file__).parent.parent
RUNS = sorted(
  path
  for path in (ROOT / 'configs' / 'runs').glob('*.gin')
  # Those of LM1B need SeqIO, see seqio_tasks_test.py; T5X's, t5x_configs_test.
  if 'lm1b' not in path.stem and not path.stem.startswith('t5x_')
)
NO_NETWORKS = [
  path
  for path in sorted((ROOT / 'configs' / 'models').glob('*_draft.gin'))
  if 'draft_sources' in path.read_text()
]
MODELS = sorted(
  path
  for path in (ROOT / 'configs' / 'models').glob('*.gin')
  if path.stem != 'initial_target' and path not in NO_NETWORKS
)
# What runs that name no task, target and draft are called with.
PAIR = [
  'configs/tasks/debian_en_de.gin',
  'configs/models/debian_target.gin',
  'configs/models/debian_draft_small.gin',
]
# What makes the quickstart's configuration finish in a moment.
SMALL = [
  'target/workload.Network.checkpoint = None',
  'draft/workload.Network.checkpoint = None',
  'target/transformer.T5Config.num_decoder_layers = 1',
  'target/transformer.T5Config.num_encoder_layers = 1',
  'draft/transformer.T5Config.num_decoder_layers = 1',
  'draft/transformer.T5Config.num_encoder_layers = 1',
  'target/transformer.T5Config.emb_dim = 16',
  'draft/transformer.T5Config.emb_dim = 16',
  'acceptance_rate.measure.num_tokens = 8',
  'walltime.measure.num_batches = 1',
  'walltime.measure.repeats = 1',
  'generate.generate.num_samples = 1',
  'NUM_EXAMPLES = 2',
  'MAX_NEW_TOKENS = 8',
]


@pytest.fixture(autouse=True)
def _fresh_gin(monkeypatch):
  monkeypatch.chdir(ROOT)
  gin.clear_config()
  yield
  gin.clear_config()


def _parse(bindings=(), files=('configs/runs/quickstart.gin',)):
  configuration.parse(list(files), list(bindings), ['.'])
  return gin.get_configurable(experiment.run)


def test_the_quickstart_leaves_everything_it_promises(tmp_path, capsys):
  source = tmp_path / 'source.jsonl'
  inputs = ['files in [/usr/share] are', 'translate: [bold] tools']
  source.write_text('\n'.join(json.dumps({'inputs': x}) for x in inputs))
  _parse(
    [
      *SMALL,
      f"OUTPUT_DIR = '{tmp_path}'",
      f"text.Prompts.source = '{source}'",
      "text.Prompts.task = '[/task]'",
      'text.Prompts.metric = None',
    ]
  )()
  lines = (tmp_path / 'predictions.jsonl').read_text().splitlines()
  assert len(lines) == 2
  for line in map(json.loads, lines):
    assert line['num_tokens'] == len(line['tokens'])
    assert sum(line['histogram']) == line['target_calls']
  (record,) = records.read(tmp_path / 'records.jsonl')
  results = record['results']
  assert results['generate']['differing_outputs'] == 0
  assert 0 <= results['acceptance_rate']['alpha'] <= 1
  assert results['walltime']['speedup_with_encoder'] > 0
  # The configuration is the one that ran, overrides included.
  assert 'emb_dim = 16' in record['config']
  assert record['config'] == (tmp_path / 'config.gin').read_text()
  samples = (tmp_path / 'samples.txt').read_text()
  assert '{+' in samples and inputs[0] in samples
  # What looks like Rich's markup is text.
  screen = capsys.readouterr().out
  assert inputs[0] in screen and '[/task]' in screen


def test_all_problems_come_at_once_and_before_any_work(tmp_path):
  run = _parse(
    [
      f"OUTPUT_DIR = '{tmp_path / 'out'}'",
      "text.Prompts.source = 'missing.jsonl'",
      "target/workload.Network.checkpoint = 'missing.safetensors'",
      "draft/workload.Network.checkpoint = 'also_missing.safetensors'",
      'workload.Workload.lenience = 2.0',
      'GAMMA = -1',
      'MAX_NEW_TOKENS = 0',
    ]
  )
  with pytest.raises(configuration.ConfigError) as error:
    run()
  for word in (
    'missing.jsonl', 'missing.safetensors', 'also_missing', 'lenience',
    'gamma', 'max_new_tokens',
  ):  # fmt: skip
    assert word in str(error.value)
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
  'binding, message',
  [
    ('workload.Workload.gama = 3', 'gama'),
    ('walltime.mesure.repeats = 3', 'mesure'),
    ('TEMPERATUR = 0.5', 'Did you mean TEMPERATURE'),
    ('drafft/transformer.T5Config.emb_dim = 3', 'Did you mean draft/'),
    ('GAMMA =', 'GAMMA'),
    ('OUTPUT_DIR = out/x', 'quotes'),
  ],
)
def test_mistyped_bindings_are_refused(binding, message):
  with pytest.raises(configuration.ConfigError, match=message):
    _parse([binding])()


def test_a_missing_gin_file_is_refused():
  with pytest.raises(configuration.ConfigError, match='nowhere.gin'):
    _parse(files=['configs/runs/nowhere.gin'])


def test_another_vocabulary_than_the_checkpoint_was_trained_with(tmp_path):
  from spec_decode.models import checkpoints

  network = tiny.network(checkpoint=str(tmp_path / 'net.safetensors'))
  untrained = tiny.network()
  checkpoints.save(
    network.checkpoint, untrained.load(), {'vocabulary': 'of another'}
  )
  (problem,) = tiny.make(tmp_path, target=network).problems()
  assert 'vocabulary' in problem


def test_every_macro_without_a_value_is_named():
  with pytest.raises(configuration.ConfigError) as error:
    _parse(files=['configs/runs/train_target.gin'])
  for name in ('TRAIN_EN_DE', 'TRAIN_SYNOPSIS', 'OUTPUT_DIR'):
    assert f'Expected a value for {name}' in str(error.value)


def test_all_that_gin_cannot_read_is_named():
  with pytest.raises(configuration.ConfigError) as error:
    _parse(['workload.Workload.gama = 3', 'GAMMA ='], ['nowhere.gin'])
  for word in ('gama', 'GAMMA', 'nowhere.gin'):
    assert word in str(error.value)


@pytest.mark.parametrize(
  'binding, message',
  [
    ('GAMMA = 0', 'gamma >= 1 to time'),
    ('GAMMA = 2.5', 'gamma to be of type int, got 2.5'),
    ("text.Prompts.metric = 'blue'", "'blue'"),
    ('NUM_EXAMPLES = -1', 'num_examples >= 1'),
    ('draft/workload.Network.vocab_size = 8010', 'one vocabulary'),
  ],
)
def test_what_a_job_cannot_work_on_is_refused_first(binding, message, tmp_path):
  run = _parse([binding, f"OUTPUT_DIR = '{tmp_path}/out'"])
  with pytest.raises(configuration.ConfigError, match=message):
    run()
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
  'binding, message',
  [
    # Values that a job is called with.
    ('acceptance_rate.measure.lenience = (2.0,)', r'in \(0, 1\], got \(2.0,'),
    ('acceptance_rate.measure.lenience = ()', r'in \(0, 1\], got \(\)'),
    ('acceptance_rate.measure.num_tokens = 0', 'num_tokens >= 1, got 0'),
    ('acceptance_rate.measure.batch_size = 0', 'batch_size >= 1, got 0'),
    ('walltime.measure.repeats = 0', 'repeats >= 1, got 0'),
    ('walltime.measure.num_batches = 0', 'num_batches >= 1, got 0'),
    ('walltime.measure.gammas = (3, 0)', r'gammas >= 1, got \(3, 0\)'),
    (
      'walltime.measure.gammas = ("x",)',
      r'walltime.measure.gammas to be of ty',
    ),
    ('generate.generate.num_samples = -1', 'num_samples >= 0, got -1'),
    ('draft/workload.Network.shortlist = 9000', 'at most the 8000 ids of'),
    # Types.
    ('workload.Workload.draft_sampling = 3', 'Sampling | None, got 3'),
    ('workload.Workload.mask = "no"', "of type bool, got 'no'"),
    ('workload.Workload.seed = True', 'of type int, got True'),
    ('TEMPERATURE = "hot"', "of type float, got 'hot'"),
    ('MAX_NEW_TOKENS = "x"', "of type int, got 'x'"),
    ('text.Prompts.vocabulary = 3', r'text.Prompts.vocabulary to be of type'),
    ('experiment.run.name = 3', 'experiment.run.name to be of type str'),
    # Networks and their weights.
    (
      'target/workload.Network.checkpoint = 3',
      'Network.checkpoint to be of ty',
    ),
    ('draft/workload.Network.layout = "foo"', "'fused'.*got 'foo'"),
    ('draft/workload.Network.dtype = "float99"', "bfloat16.*got 'float99'"),
    ('draft/transformer.T5Config.dtype = "float99"', "got 'float99'"),
    (
      'draft/transformer.T5Config.emb_dim = 255',
      r'expected \(255,\), got \(64',
    ),
    ('draft/transformer.T5Config.num_heads = 0', 'num_heads=0.*its config'),
    (
      'draft/transformer.T5Config.mlp_activations = ("foo",)',
      "activations=.'foo'.*its config",
    ),
    (
      'draft/workload.Network.checkpoint = "README.md"',
      'debian-small, got another: .*README.md is no checkpoint',
    ),
    # Prompts.
    ('text.Prompts.input_length = 0', 'input_length >= 1, got 0'),
    ('text.Prompts.vocabulary = "README.md"', 'SentencePiece model in'),
  ],
)
def test_values_that_nothing_could_work_with_are_refused(binding, message):
  with pytest.raises(configuration.ConfigError, match=message) as error:
    _parse([binding])(only_check=True)
  assert '1 thing(s) to correct' in str(error.value)


def test_problems_of_jobs_and_of_the_workload_come_together():
  bindings = [
    'acceptance_rate.measure.lenience = (2.0,)',
    'walltime.measure.repeats = "many"',
    'TEMPERATURE = "hot"',
    'draft/workload.Network.layout = "foo"',
  ]
  with pytest.raises(configuration.ConfigError, match='3 thing') as error:
    _parse(bindings)(only_check=True)
  for word in ("'many'", "'hot'", "'foo'"):
    assert word in str(error.value)


def test_a_job_without_a_value_for_an_argument_is_refused():
  from spec_decode.measure import curves

  with pytest.raises(configuration.ConfigError, match="argument: 'name'"):
    experiment.run([curves.measure], 'out', 'theory', only_check=True)


def test_a_curve_that_is_none_is_refused():
  run = _parse(['CURVES = "figure9"'], ['configs/runs/theory.gin'])
  with pytest.raises(configuration.ConfigError, match="table1.*got 'figure9'"):
    run(only_check=True)


def test_jobs_with_a_scope_are_checked_with_its_bindings(tmp_path):
  file = tmp_path / 'scoped.gin'
  file.write_text("""
from __gin__ import dynamic_registration
from spec_decode import experiment
from spec_decode.measure import curves
experiment.run.jobs = (@mine/curves.measure,)
experiment.run.output_dir = 'out'
experiment.run.name = 'scoped'
mine/curves.measure.name = %NAME
""")
  assert _parse(['NAME = "table1"'], [str(file)])(only_check=True) is None
  gin.clear_config()
  with pytest.raises(configuration.ConfigError, match="got 'figure9'"):
    _parse(['NAME = "figure9"'], [str(file)])(only_check=True)


@pytest.mark.parametrize(
  'run, binding, message',
  [
    ('benchmark', 'benchmark.measure.repeats = 0', 'repeats >= 1, got 0'),
    ('benchmark', 'benchmark.measure.widths = "x"', 'widths to be of type'),
    ('convert_to_t5x', 'convert.to_t5x.layout = "zip"', "got 'zip'"),
  ],
)
def test_jobs_without_a_workload_are_checked(run, binding, message):
  with pytest.raises(configuration.ConfigError, match=message):
    _parse([binding], [f'configs/runs/{run}.gin'])(only_check=True)


def test_refusals_are_in_words_of_this_project_alone():
  bad = 'workload.Workload.lenience = 2.0'
  with pytest.raises(configuration.ConfigError) as error:
    _parse([bad])(only_check=True)
  assert 'In call to configurable' in str(error.value)  # gin's doing
  assert configuration.words(error.value).endswith('got 2.0. 1 is exact.')


def test_a_row_with_values_that_cannot_be_made_is_refused_by_a_sweep(tmp_path):
  """Such as a sampling whose own checks fail: gin makes it for the call."""
  row = tmp_path / 'row.gin'
  row.write_text(
    'from __gin__ import dynamic_registration\n'
    'from spec_decode import sampling\nfrom spec_decode import workload\n'
    'workload.Workload.draft_sampling = @sampling.Sampling()\n'
    'sampling.Sampling.top_p = 3.0\n'
  )
  files = ('configs/runs/quickstart.gin', str(row))
  rows = [experiment.Rows(files=files, folders=('t',))]
  with pytest.raises(configuration.ConfigError, match='top_p') as error:
    experiment.sweep(rows, str(tmp_path))
  assert 'In call to configurable' not in str(error.value)


@pytest.mark.parametrize('job', ['trace', 'timeline'])
def test_an_example_that_is_not_there_is_refused(job):
  files = [
    f'configs/runs/{job}.gin',
    'configs/tasks/debian_en_de.gin',
    'configs/models/debian_target.gin',
    'configs/models/debian_draft_small.gin',
  ]
  run = _parse([f'{job}.measure.example = 1000'], files)
  with pytest.raises(configuration.ConfigError, match='in 0..999.*got 1000'):
    run(only_check=True)


def test_what_training_cannot_work_with_is_refused_first(tmp_path):
  files = [
    'configs/runs/train_draft_on_text.gin',
    'configs/models/debian_draft_small.gin',
  ]
  written = tiny.examples(tmp_path / 'written.jsonl')
  bindings = [
    f"GENERATED = '{written}'",
    f"OUTPUT_DIR = '{tmp_path}/out'",
    "generated/training.Source.targets = 'targets'",
    'train.train.teacher = %DRAFT',
    'train.train.save_every = 0',
    "draft/workload.Network.checkpoint = 'none.safetensors'",
  ]
  with pytest.raises(configuration.ConfigError, match='3 thing') as error:
    _parse(bindings, files)()
  for word in ('a teacher exactly', 'save_every >= 1', 'none.safetensors'):
    assert word in str(error.value)
  assert not (tmp_path / 'out').exists()


def test_a_missing_source_of_prompts_to_go_on_from_is_refused():
  bindings = ["text.Prompts.source = 'missing.jsonl'", 'GAMMA = -1']
  run = _parse(bindings, ['configs/runs/debian_lm.gin'])
  with pytest.raises(configuration.ConfigError, match='missing.jsonl') as error:
    run(only_check=True)
  assert 'gamma >= 0' in str(error.value)


def test_all_values_that_a_file_calls_required_are_asked_for():
  names = ('GAMMA', 'TEMPERATURE')
  with pytest.raises(configuration.ConfigError) as error:
    _parse([f'{name} = %gin.REQUIRED' for name in names])
  for name in names:
    assert f'Expected a value for {name}, got none' in str(error.value)
  # A parameter is not a macro: gin itself asks for it.
  gin.clear_config()
  binding = 'workload.Workload.lenience = %gin.REQUIRED'
  with pytest.raises(configuration.ConfigError, match='lenience.*REQUIRED'):
    _parse([binding])


def test_texts_beyond_a_table_of_positions_are_refused_first():
  run = _parse(['MAX_NEW_TOKENS = 300'], ['configs/runs/debian_lm.gin'])
  with pytest.raises(configuration.ConfigError, match='num_positions'):
    run(only_check=True)


def test_one_job_twice_is_refused(tmp_path):
  job = lambda output_dir: {}
  with pytest.raises(configuration.ConfigError, match='more than once'):
    experiment.run([job, job], str(tmp_path), 'twice')


@pytest.mark.parametrize('path', RUNS, ids=lambda p: p.stem)
def test_every_run_config_has_no_idle_binding(path):
  required = {
    'train_target': ['TRAIN_EN_DE', 'TRAIN_SYNOPSIS', 'OUTPUT_DIR'],
    'train_draft': ['TRAIN_EN_DE', 'TRAIN_SYNOPSIS', 'OUTPUT_DIR', 'GENERATED'],
    'train_draft_on_text': ['OUTPUT_DIR', 'GENERATED'],
    'training_text': ['SOURCE', 'OUTPUT_DIR'],
    'train_lm_target': ['TRAIN_EN_DE', 'TRAIN_SYNOPSIS', 'OUTPUT_DIR'],
    'train_lm_draft': [
      'TRAIN_EN_DE',
      'TRAIN_SYNOPSIS',
      'OUTPUT_DIR',
      'GENERATED',
    ],
    'lm_text': ['SOURCE', 'OUTPUT_DIR'],
    'count_ngrams': ['SOURCE', 'OUTPUT_DIR'],
    'count_ngrams_english': ['SOURCE', 'OUTPUT_DIR'],
  }.get(path.stem, [])
  files = [str(path)]
  if path.stem.startswith('train_draft'):
    files.append('configs/models/debian_draft_base.gin')
  if path.stem in ('alpha', 'pair', 'timeline', 'trace'):
    files += PAIR
  bindings = [f"{name} = 'x'" for name in required]
  configuration.parse(files, bindings, ['.'])
  is_sweep = path.stem.startswith('tables')
  root = experiment.sweep if is_sweep else experiment.run
  assert configuration.unreachable_bindings(root) == []


@pytest.mark.parametrize('path', MODELS, ids=lambda p: p.stem)
def test_every_model_config_builds_what_its_header_says(path):
  from spec_decode.models import checkpoints

  gin.parse_config_file(str(path))
  macro = 'DRAFT' if 'draft' in path.stem else 'TARGET'
  network = _built(f'{macro}/gin.macro.value')
  shapes = checkpoints.expected_shapes(network.config)
  # LaMDA's paper counts without the embeddings.
  counted = [
    shape
    for name, shape in shapes.items()
    if not path.stem.startswith('lamda') or name.endswith('kernel')
  ]
  millions = sum(map(math.prod, counted)) / 1e6
  header = path.read_text().partition('\nfrom')[0].replace(',', '')
  header = ' '.join(header.replace('#', '').split())
  stated = [word for word in header.split() if word.replace('.', '').isdigit()]
  if ' M parameters' in header:
    assert round(millions) in [round(float(number)) for number in stated]


def _built(parameter):
  return gin.query_parameter(parameter).scoped_configurable_fn()


@pytest.mark.parametrize('index', [0, 2])
def test_one_of_several_processes_writes_where_it_was_told(
  index, tmp_path, monkeypatch
):
  def job(output_dir):
    (pathlib.Path(output_dir) / 'made').write_text('')
    return {'index': index}

  gin.clear_config()
  monkeypatch.setattr(experiment.jax, 'process_index', lambda: index)
  told = tmp_path / 'told' / 'records.jsonl'
  experiment.run((job,), str(tmp_path / 'out'), 'a', record_path=str(told))
  folder = tmp_path / 'out' / 'process_2' if index else tmp_path / 'out'
  assert (folder / 'made').exists() and (folder / 'config.gin').exists()
  assert told.exists() == (index == 0)
  assert (folder / 'records.jsonl').exists() == (index == 2)


def test_the_command_line_refuses_in_words_and_with_a_status():
  result = subprocess.run(
    [sys.executable, '-m', 'spec_decode.run',
     '--gin_file=configs/runs/quickstart.gin', '--gin.GAMA=3'],
    capture_output=True, text=True, cwd=ROOT,
  )  # fmt: skip
  assert result.returncode == 2
  assert 'Did you mean GAMMA' in result.stderr
  assert 'Traceback' not in result.stderr
  assert 'configurable' not in result.stderr
