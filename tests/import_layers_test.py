# SPDX-License-Identifier: Apache-2.0
"""Imports only point down, and heavy packages stay at the edges."""

import ast
import itertools
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'spec_decode'

# Layer by layer, in the order of reading: a module may import what stands
# above it. A folder stands for all its modules.
LAYERS = [
  ['checks', 'sampling', 'randomness', 'acceptance', 'theory'],
  ['language_model', 'autoregressive', 'speculative'],
  [
    'models.layers',
    'models.kv_cache',
    'models.layouts',
    'models.stacks',
    'models.transformer',
    'models.decoder_only',
    'models.files',
    'models.ngram',
    'models.hugging_face',
    'models.checkpoints',
    'drafts',
    'copy_draft',
  ],
  [
    'data.text',
    'data.training',
    'data.tasks',
    'data.prompts',
    'models.t5x_checkpoints',
    'models.t5x_model',
    'models.t5x_stock',
  ],
  [
    'workload',
    'draft_sources',
    'records',
    'report',
    'train',
    'measure',
    'generate',
    'convert',
    'configuration',
    'experiment',
  ],
  ['run'],
]
# Outside packages -> who may import them.
EDGES = (
  'data.tasks',
  'data.prompts',
  'models.t5x_checkpoints',
  'models.t5x_model',
  'models.t5x_stock',
)
RESTRICTED = {
  **dict.fromkeys(
    ('tensorflow', 'tensorflow_datasets', 'seqio', 't5', 't5x'), EDGES
  ),
  'gin': ('configuration', 'experiment'),
  'absl': ('run',),
  'optax': ('train',),
  'flax': (*LAYERS[1], *LAYERS[2], *LAYERS[3], *LAYERS[4]),
  'orbax': (*LAYERS[2], *LAYERS[3], *LAYERS[4]),
}


def modules():
  """Dotted name inside the package -> path; `__init__` files apart."""
  return {
    '.'.join(path.relative_to(PACKAGE).with_suffix('').parts): path
    for path in sorted(PACKAGE.rglob('*.py'))
    if path.name != '__init__.py'
  }


MODULES = modules()


def entry(module):
  """The (layer, place) of a module, or None."""
  for number, layer in enumerate(LAYERS):
    for place, name in enumerate(layer):
      if module == name or module.startswith(f'{name}.'):
        return number, place
  return None


def test_every_place_is_taken():
  for name in itertools.chain(*LAYERS):
    path = PACKAGE / name.replace('.', '/')
    assert path.is_dir() or path.with_suffix('.py').is_file(), name


def imports(path):
  """Dotted names that a file imports anywhere, functions included."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
  return found


def own(name):
  """The module of this package that an imported name is or is in."""
  parts = name.split('.')
  if parts[0] != 'spec_decode':
    return None
  for end in (len(parts), len(parts) - 1):
    if '.'.join(parts[1:end]) in MODULES:
      return '.'.join(parts[1:end])
  return None


@pytest.mark.parametrize('module', MODULES)
def test_imports_point_down(module):
  assert entry(module) is not None, f'give {module} a place in LAYERS'
  layer, _ = entry(module)
  for name in imports(MODULES[module]):
    imported = own(name)
    if imported is None:
      assert not name.startswith('spec_decode'), f'{name} does not exist'
      continue
    if entry(imported) == entry(module):
      continue  # modules of one folder
    assert entry(imported) < entry(module), f'{module} imports {imported}'
    # Jobs take batches as arguments: no job reads data through TensorFlow.
    if layer >= 4:
      assert imported not in EDGES, f'{module} imports {imported}'


@pytest.mark.parametrize('module', MODULES)
def test_outside_packages_stay_in_their_layers(module):
  for name in imports(MODULES[module]):
    allowed = RESTRICTED.get(name.split('.')[0])
    if allowed is None:
      continue
    good = any(module == a or module.startswith(f'{a}.') for a in allowed)
    assert good, f'{module} imports {name}'


def test_the_maths_needs_jax_and_numpy_only():
  allowed = {'jax', 'numpy', 'spec_decode'} | set(sys.stdlib_module_names)
  for module in LAYERS[0]:
    used = {name.split('.')[0] for name in imports(MODULES[module])}
    assert used <= allowed, module


def test_folders_hold_thin_init_files():
  for path in PACKAGE.rglob('__init__.py'):
    body = ast.parse(path.read_text()).body
    assert all(
      isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr)
      for node in body
    ), path
    for name in imports(path):
      assert entry(own(name))[0] <= 2, f'{path} imports {name}'


def loaded_after(statements):
  """Top-level packages in memory after statements in a fresh interpreter.

  The heavy ones are made impossible to import, as where they are absent.
  """
  code = f"""
import sys
heavy = {sorted(RESTRICTED.keys() - {'flax', 'orbax', 'optax', 'absl'})}
before = set(sys.modules)
sys.modules.update(dict.fromkeys(heavy))
{statements}
print(*sorted({{name.split('.')[0] for name in set(sys.modules) - before}}))
"""
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return set(done.stdout.split())


def test_the_package_loads_where_heavy_ones_are_absent():
  # Without blocking anything: it does not even ask for them.
  code = 'import sys, spec_decode; print(*sys.modules)'
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  loaded = {name.split('.')[0] for name in done.stdout.split()}
  assert {'jax', 'flax', 'spec_decode'} <= loaded
  for name in (
    'tensorflow',
    'tensorflow_datasets',
    'seqio',
    't5',
    't5x',
    'gin',
  ):
    assert name not in loaded


def test_the_lower_layers_load_where_heavy_packages_are_absent():
  lower = [m for m in MODULES if entry(m)[0] <= 2 or m == 'data.text']
  assert len(lower) >= 12
  loaded = loaded_after('\n'.join(f'import spec_decode.{m}' for m in lower))
  assert 'spec_decode' in loaded
  with pytest.raises(AssertionError, match='seqio'):
    loaded_after('import spec_decode.data.tasks')
