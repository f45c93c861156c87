# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints into the one train state of a T5X model with a draft."""

from collections.abc import Mapping
import os
from typing import Any

from flax import traverse_util
from flax.core import freeze
from flax.core import unfreeze
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from t5x import utils
from t5x.checkpoints import OrbaxCheckpointManagerInterface

from spec_decode.models import checkpoints
from spec_decode.models import files
from spec_decode.models import ngram


class SpeculativeCheckpointManager:
  """Restores target and draft from a checkpoint each.

  For `RestoreCheckpointConfig.checkpoint_manager_cls`. Legacy and Orbax
  checkpoints mix, with or without an optimizer's state. Every name and shape
  is compared first, since Orbax restores a wrong width without a word.

  Args:
    directory: unused; T5X names the target's path when it restores.
    train_state: shapes of both.
    partitioner: of T5X.
    draft_path: the draft's checkpoint_N, or a file of n-gram tables.
    restore_dtype: of the networks; None as stored.
    **kwargs: what T5X gives to managers that save.
  """

  def __init__(
    self,
    directory: str,
    train_state: Any,
    partitioner: Any,
    draft_path: str,
    restore_dtype: Any = None,
    **kwargs,
  ):
    del directory, kwargs
    self._state = train_state
    self._partitioner = partitioner
    self.draft_path = os.fspath(files.absolute(draft_path))
    self._restore_dtype = restore_dtype

  def restore(
    self,
    path: str,
    fallback_state: Any = None,
    state_transformation_fns: Any = (),
  ) -> Any:
    """The train state with both halves.

    Args:
      path: the target's checkpoint_N.
      fallback_state: refused, parameters are never made up.
      state_transformation_fns: refused.

    Raises:
      ValueError: a checkpoint does not hold what its half needs; every
        difference is named.
    """
    if fallback_state is not None or state_transformation_fns:
      raise ValueError(
        'Expected no fallback_to_scratch, assignment_map or'
        ' state_transformation_fns: both checkpoints must hold the parameters'
        ' of their networks.'
      )
    # Orbax takes no path that depends on the working directory.
    path = os.fspath(files.absolute(path))
    checkpoints.check_t5x(path, _shapes(self._state.params['target']))
    expected = _shapes(self._state.params['draft'])
    tables = self._load_tables(expected) if 'unigram' in expected else None
    if tables is None:
      self._check_network(expected)
    target = self._restore_half('target', path)
    if tables is None:
      draft = self._restore_half('draft', self.draft_path).params
    else:
      everywhere = NamedSharding(self._partitioner.mesh, PartitionSpec())
      draft = jax.device_put(tables, everywhere)
    return self._state.replace(
      step=target.step,
      params=freeze({'target': target.params, 'draft': draft}),
    )

  def _check_network(self, expected: Any) -> None:
    if self.draft_path.endswith('.safetensors'):
      raise ValueError(
        "Expected a directory checkpoint_N of the draft's network, got"
        f' {self.draft_path}. If it holds a network, configs/runs/'
        'convert_to_t5x.gin writes that directory from it; if n-gram tables,'
        ' configs/t5x/draft_ngram.gin makes them the draft.'
      )
    checkpoints.check_t5x(self.draft_path, expected)

  def _load_tables(self, expected: Any) -> ngram.Tables:
    tables = ngram.load(self.draft_path)
    if (got := _shapes(tables)) != expected:
      raise ValueError(
        f'Expected the tables of the draft, {expected}, got {got} in'
        f' {self.draft_path}. Give both the same file, as'
        ' configs/t5x/draft_ngram.gin does.'
      )
    return tables

  def _restore_half(self, half: str, path: str) -> Any:
    state = self._state.replace(
      params=self._state.params[half],
      params_axes=self._state.params_axes[half],
    )
    manager = OrbaxCheckpointManagerInterface(
      path, state, self._partitioner, restore_dtype=self._restore_dtype
    )
    try:
      return manager.restore(path=path)
    finally:
      manager.close()

  def restore_from_tf_checkpoint(self, path: str, strict: bool = True) -> Any:
    """Refuses what T5X would read with it."""
    raise ValueError(
      f'{path} is a checkpoint of Mesh TensorFlow. Restore and save it with'
      ' T5X first: t5x/scripts/convert_tf_checkpoint.py.'
    )


def train_state_initializer(
  *, input_shapes: Mapping[str, tuple[int, ...]], partitioner: Any, **kwargs
) -> utils.TrainStateInitializer:
  """T5X's own, once the batch is known to fit the mesh.

  For `train_state_initializer_cls` of `infer` and `evaluate`, where the two
  first meet. T5X compares them only when the checkpoints are restored.

  Args:
    input_shapes: of the features, batch first.
    partitioner: of T5X.
    **kwargs: further arguments of `utils.TrainStateInitializer`.

  Raises:
    ValueError: the data axis of the mesh does not divide the batch.
  """
  (batch_size,) = {shape[0] for shape in input_shapes.values()}
  shards = partitioner.data_mesh_size
  if batch_size % shards:
    name = 'partitioning.PjitPartitioner'
    raise ValueError(
      f'Expected a batch size that the data axis of the mesh, {shards},'
      f' divides, got {batch_size}. Put all {partitioner.mesh.size} devices on'
      f' the model axis, --gin.{name}.num_partitions={partitioner.mesh.size}'
      f' (or --gin.{name}.model_parallel_submesh), or give'
      f' --gin.utils.DatasetConfig.batch_size={shards}.'
    )
  return utils.TrainStateInitializer(
    input_shapes=input_shapes, partitioner=partitioner, **kwargs
  )


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
  """Name -> shape."""
  flat = traverse_util.flatten_dict(unfreeze(params), sep='/')
  return {name: x.shape for name, x in flat.items()}
