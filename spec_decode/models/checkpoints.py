# SPDX-License-Identifier: Apache-2.0
"""Parameters on disk: read from five layouts, checked, written in three.

Names are T5X's, slash-joined: `decoder/layers_0/mlp/wi_0/kernel`. `load` finds
out the layout by itself and compares the whole tree with the one the config
implies: a name or shape that differs is an error, never a fresh parameter.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import json
import os
import re
from typing import Any
import uuid

from etils import epath
from flax import serialization
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
import safetensors.numpy
import tensorstore as ts

from spec_decode.models import files
from spec_decode.models import hugging_face
from spec_decode.models import transformer
from spec_decode.models.files import Path

Arrays = dict[str, np.ndarray]  # by slash-joined name

_FORMATS = """Known are
  a file *.safetensors, as `save` writes it;
  a Hugging Face directory (config.json and model.safetensors or its shards);
  a T5X legacy directory checkpoint_N (file `checkpoint` and folders);
  a T5X Orbax directory checkpoint_N (folder `state`);
  an Orbax directory of parameters alone."""
_HF_INDEX = 'model.safetensors.index.json'
_SCANNED = re.compile(r'(encoder|decoder)/(encoder|decoder|layers)/')


@functools.cache
def expected_shapes(config: transformer.T5Config) -> dict[str, tuple[int, ...]]:
  """Name -> shape of every parameter `config` implies; allocates nothing."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  net = transformer.network(config)
  init = functools.partial(net.init, enable_dropout=False)
  tree = jax.eval_shape(init, jax.random.key(0), tokens, tokens)['params']
  flat = traverse_util.flatten_dict(tree, sep='/')
  return {name: leaf.shape for name, leaf in flat.items()}


def load(path: Path, config: transformer.T5Config, dtype: Any = None) -> Any:
  """Reads the parameters of one network, whatever wrote them.

  Args:
    path: a file or directory in one of the layouts of `_FORMATS`.
    config: the sizes; the checkpoint has to hold exactly this tree.
    dtype: of the result; float32 when None.

  Returns:
    The nested dict of arrays that `network(config)` takes as `params`.

  Raises:
    FileNotFoundError: nothing is there.
    ValueError: the layout is unknown, a file is damaged, or the tree is not
      that of `config`: every missing, unexpected and mis-shaped name is named.
  """
  path = files.absolute(path)
  read, place = _layout(path)
  expected = expected_shapes(config)
  arrays = _fitting(path, read(place), expected)
  dtype = jnp.float32 if dtype is None else dtype
  # Popped, so that a stored copy is freed once it is converted.
  params = {name: jnp.asarray(arrays.pop(name), dtype) for name in expected}
  return traverse_util.unflatten_dict(params, sep='/')


def check(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
  """Compares names and shapes, as `load` does; reads no array.

  Args:
    path: a file or directory in one of the layouts of `_FORMATS`.
    expected: name -> shape of all that it has to hold, and nothing else.

  Raises:
    FileNotFoundError: nothing is there.
    ValueError: as `load`.
  """
  path = files.absolute(path)
  _check_stored(path, *_layout(path), expected)


def check_t5x(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
  """As `check`, and refuses what T5X cannot restore."""
  path = files.absolute(path)
  restored = (_read_legacy, path), (_read_orbax, path / 'state')
  # T5X takes the step from the name.
  named = re.fullmatch(r'checkpoint_\d+', path.name)
  found = _layout(path)
  if found not in restored or not named:
    raise ValueError(
      'Expected a directory checkpoint_N in a layout of T5X, legacy or Orbax'
      f' with a folder `state`, got {path}. configs/runs/convert_to_t5x.gin'
      ' writes one from any checkpoint.'
    )
  _check_stored(path, *found, expected)


def _check_stored(path, read: Callable, place: epath.Path, expected) -> None:
  shapes = {
    _read_safetensors: _safetensors_shapes,
    _read_shards: _shards_shapes,
    _read_legacy: _legacy_shapes,
    _read_orbax: _orbax_shapes,
  }
  _fitting(path, shapes[read](place), expected)


def _layout(path: epath.Path) -> tuple[Callable, epath.Path]:
  """What reads the checkpoint, and the file or folder to give to it."""
  if not path.exists():
    raise FileNotFoundError(f'{path}: no such file or directory.')
  if path.suffix == '.safetensors' and path.is_file():
    return _read_safetensors, path
  if (path / _HF_INDEX).exists():
    return _read_shards, path
  if (path / 'model.safetensors').exists():
    return _read_safetensors, path / 'model.safetensors'
  # Before `checkpoint`: an Orbax directory may have a file of that name too.
  for folder in (path, path / 'state', path / 'default', path / 'params'):
    if any((folder / n).exists() for n in ('_METADATA', 'manifest.ocdbt')):
      return _read_orbax, folder
  if (path / 'checkpoint').is_file():
    return _read_legacy, path
  names = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
  hint = f' It holds {", ".join(names[:20])}.' if names else ''
  if any(name.startswith('checkpoint_') for name in names):
    hint += ' Name one of its checkpoint_N directories.'
  if 'pytorch_model.bin' in names:
    hint += ' Pickles are not read: save the model again as safetensors.'
  raise ValueError(f'{path} is no checkpoint.{hint} {_FORMATS}')


def _forms(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...] | str]:
  """Shapes of whatever has them; the dtype of those that are not of floats."""
  return {
    # Bits of floats kept as integers would become large numbers.
    name: tuple(x.shape)
    if jnp.issubdtype(x.dtype, jnp.floating)
    else f'{x.dtype}'
    for name, x in arrays.items()
  }


def _fitting(path: epath.Path, arrays: Mapping, expected: Mapping) -> dict:
  """Arrays, or their shapes, by T5X's names; raises unless they fit."""
  if 'shared.weight' in arrays:
    arrays = hugging_face.renamed(arrays, expected)
  _check(path, _forms(arrays), expected)
  return arrays


def _check(path: epath.Path, found: Mapping, expected: Mapping) -> None:
  """Raises one ValueError with every difference from name -> shape."""
  scanned = [name for name in found if _SCANNED.match(name)]
  if scanned:
    raise ValueError(
      f'{path} holds scanned layers: {scanned[0]}, {found[scanned[0]]}, where'
      ' layers_0, layers_1, ... are expected. In that network (scalable_t5)'
      ' every layer has its own relative bias, so the weights do not fit'
      ' this one. Use a checkpoint of the unscanned t5x/examples/t5.'
    )
  missing = sorted(expected.keys() - found.keys())
  extra = sorted(found.keys() - expected.keys())
  common = sorted(expected.keys() & found.keys())
  wrong = [name for name in common if found[name] != expected[name]]
  if not missing + extra + wrong:
    return
  lines = [f'{path} does not hold the parameters that the config implies.']
  lines += [f'  missing: {name}, expected {expected[name]}' for name in missing]
  lines += [f'  unexpected: {name}, got {found[name]}' for name in extra]
  lines += [
    f'  wrong: {name}, expected {expected[name]}, got {found[name]}'
    for name in wrong
  ]
  lines.append('Give the config the sizes of this checkpoint, or another path.')
  name = 'token_embedder/embedding'
  if name in wrong and expected[name][0] != found[name][0]:
    lines.append(
      f'The config has vocab_size={expected[name][0]}, the checkpoint'
      f' {found[name][0]} rows. Padding counts: rows are neither cut nor added.'
    )
  if 'decoder/logits_dense/kernel' in missing:
    lines.append(
      'It has no output matrix. T5 1.0 wants logits_via_embedding=True; a 1.1'
      ' without lm_head.weight lost it when it was saved with tied embeddings.'
    )
  raise ValueError('\n'.join(lines))


def _unwrap(tree: Any) -> tuple[list[str], Any]:
  """Keys that lead to the parameters in T5X's or Flax's tree, and these."""
  keys = []
  for key in ('optimizer', 'target', 'params'):
    if key in tree:
      keys, tree = [*keys, key], tree[key]
  return keys, tree


def _read_safetensors(path: epath.Path) -> Arrays:
  file = files.open_safetensors(path)
  return {name: file.get_tensor(name) for name in file.offset_keys()}


def _safetensors_shapes(path: epath.Path) -> Arrays:
  """Zeros in the place of what a file holds, which take no memory."""
  file, arrays = files.open_safetensors(path), {}
  for name in file.offset_keys():
    stored = file.get_slice(name)
    shape = stored.get_shape()
    dtype = (stored[:0] if shape else file.get_tensor(name)).dtype
    arrays[name] = np.broadcast_to(np.zeros((), dtype), shape)
  return arrays


def _read_shards(path: epath.Path, read=_read_safetensors) -> Arrays:
  """Arrays of a Hugging Face directory with more than one file."""
  index = json.loads((path / _HF_INDEX).read_text())['weight_map']
  shards = [read(path / name) for name in set(index.values())]
  return {name: x for shard in shards for name, x in shard.items()}


_shards_shapes = functools.partial(_read_shards, read=_safetensors_shapes)


def _legacy_tree(path: epath.Path) -> dict[str, Any]:
  """T5X's msgpack file by name: arrays, and specs of those in folders."""
  try:
    tree = serialization.msgpack_restore((path / 'checkpoint').read_bytes())
    _, tree = _unwrap(tree)
    is_spec = lambda _, node: {'driver', 'kvstore', 'metadata'} <= node.keys()
    return traverse_util.flatten_dict(tree, is_leaf=is_spec, sep='/')
  except Exception as error:  # msgpack raises many kinds
    raise ValueError(
      f'{path}/checkpoint is no T5X checkpoint ({error}). {_FORMATS}'
    ) from error


def _legacy_shapes(path: epath.Path) -> dict[str, Any]:
  stored = lambda spec: jax.ShapeDtypeStruct(
    spec['metadata']['shape'],
    # Files differ in where they say it.
    jnp.dtype(spec['metadata'].get('dtype') or spec['dtype']),
  )
  return {
    name: stored(x) if isinstance(x, dict) else x
    for name, x in _legacy_tree(path).items()
  }


def _read_legacy(path: epath.Path) -> Arrays:
  """Arrays of T5X's msgpack file and of the folders beside it."""
  arrays = _legacy_tree(path)
  for name, spec in arrays.items():
    if isinstance(spec, dict):
      # TensorStore before 0.1.14 kept the path outside `kvstore`. Driver and
      # bucket are those of the place written to, not of this one.
      folder = spec['kvstore'].get('path') or spec['path']
      arrays[name] = _zarr(path / folder, open=True).read()
  return {
    name: x.result() if isinstance(x, ts.Future) else np.asarray(x)
    for name, x in arrays.items()
  }


def _zarr(path: epath.Path, **options) -> ts.TensorStore:
  """Opens one array of a legacy checkpoint."""
  kvstore = {'driver': 'file', 'path': os.fspath(path)}
  if match := re.fullmatch('gs://([^/]+)/(.*)', kvstore['path']):
    kvstore = {'driver': 'gcs', 'bucket': match[1], 'path': match[2]}
  spec = {'driver': 'zarr', 'kvstore': kvstore}
  # Else a chunk that was lost in copying is read as zeros.
  spec['fill_missing_data_reads'] = False
  return ts.open(spec, **options).result()


def _orbax_shapes(path: epath.Path) -> dict[str, Any]:
  with ocp.PyTreeCheckpointer() as checkpointer:
    _, tree = _unwrap(checkpointer.metadata(path).item_metadata.tree)
  return traverse_util.flatten_dict(tree, sep='/')


def _read_orbax(path: epath.Path) -> Arrays:
  """Arrays of the parameters alone; optimizer states stay on disk."""
  with ocp.PyTreeCheckpointer() as checkpointer:
    tree = checkpointer.metadata(path).item_metadata.tree
    keys, tree = _unwrap(tree)
    args = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), tree)
    for key in reversed(keys):
      tree, args = {key: tree}, {key: args}
    args = ocp.args.PyTreeRestore(tree, restore_args=args, partial_restore=True)
    tree = checkpointer.restore(path, args=args)
  return traverse_util.flatten_dict(_unwrap(tree)[1], sep='/')


def _cast(params: Any, dtype: Any) -> Arrays:
  dtype = jnp.dtype(dtype)
  if dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f'dtype is {dtype}, expected float32 or bfloat16.')
  flat = traverse_util.flatten_dict(params, sep='/')
  # safetensors writes the buffer of an array whatever its strides are.
  return {k: np.asarray(x, dtype, order='C') for k, x in flat.items()}


def save(
  path: Path,
  params: Any,
  metadata: Mapping[str, Any] | None = None,
  dtype: Any = 'float32',
  overwrite: bool = False,
) -> None:
  """Writes one *.safetensors file, by renaming a complete one.

  Args:
    path: of the file.
    params: the nested dict of arrays.
    metadata: what JSON can say, for `load_metadata`.
    dtype: float32 or bfloat16.
    overwrite: replace a file that is there.

  Raises:
    FileExistsError: a file is there and `overwrite` is False.
    ValueError: another dtype, or another suffix.
  """
  path = files.absolute(path)
  if path.suffix != '.safetensors':
    raise ValueError(f'{path}: expected a name that ends in .safetensors.')
  if path.exists() and not overwrite:
    raise FileExistsError(f'{path} exists. Pass overwrite=True to replace it.')
  header = {'spec_decode': json.dumps(metadata or {})}
  temporary = path.parent / f'.{path.name}.{uuid.uuid4().hex}'
  try:
    temporary.write_bytes(safetensors.numpy.save(_cast(params, dtype), header))
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)


def load_metadata(path: Path) -> dict[str, Any]:
  """What was given to `save`; {} for a safetensors file of someone else."""
  file = files.open_safetensors(files.absolute(path))
  return json.loads((file.metadata() or {}).get('spec_decode', '{}'))


def _t5x_folder(directory: Path, step: int) -> epath.Path:
  path = files.absolute(directory) / f'checkpoint_{step}'
  if path.exists():
    raise FileExistsError(f'{path} exists. Remove it or take another step.')
  return path


def save_t5x_legacy(
  directory: Path, params: Any, step: int, dtype: Any = 'float32'
) -> None:
  """Writes `directory`/checkpoint_<step>, without optimizer state."""
  path = _t5x_folder(directory, step)
  specs = _cast(params, dtype)
  path.mkdir(parents=True)
  for name, x in specs.items():
    folder = 'target.' + name.replace('/', '.')
    array = _zarr(path / folder, create=True, dtype=x.dtype, shape=x.shape)
    array.write(x).result()
    spec = array.spec().to_json()
    specs[name] = {key: spec[key] for key in ('driver', 'dtype', 'metadata')}
    # T5X makes a path of its own kind from this one.
    specs[name]['kvstore'] = {'driver': 'file', 'path': folder}
  target = traverse_util.unflatten_dict(specs, sep='/')
  tree = {'target': target, 'state': {'step': np.array(step, np.int32)}}
  tree = {'version': 3, 'optimizer': tree}
  # Last, because without this file the directory is no checkpoint.
  (path / 'checkpoint').write_bytes(serialization.msgpack_serialize(tree))


def save_t5x_orbax(
  directory: Path, params: Any, step: int, dtype: Any = 'float32'
) -> None:
  """Writes `directory`/checkpoint_<step>, without optimizer state."""
  path = _t5x_folder(directory, step)
  target = traverse_util.unflatten_dict(_cast(params, dtype), sep='/')
  tree = {'target': target, 'state': {'step': np.array(step, np.int32)}}
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(tree))
    checkpointer.save(path, args=args)
