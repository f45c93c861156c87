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
    self.draft_path = os.fspath(checkpoints.absolute(draft_path))
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
      ValueError: a checkpoint does not hold what its network needs; every
        difference is named.
    """
    if fallback_state is not None or state_transformation_fns:
      raise ValueError(
        'Expected no fallback_to_scratch, assignment_map or'
        ' state_transformation_fns: both checkpoints must hold the parameters'
        ' of their networks.'
      )
    tables = self.draft_path.endswith('.safetensors')
    shapes = lambda half: {
      name: x.shape
      for name, x in traverse_util.flatten_dict(
        unfreeze(self._state.params[half]), sep='/'
      ).items()
    }
    # Orbax takes no path that depends on the working directory.
    path = os.fspath(checkpoints.absolute(path))
    checkpoints.check_t5x(path, shapes('target'))
    if not tables:
      checkpoints.check_t5x(self.draft_path, shapes('draft'))
    target = self._restore_half('target', path)
    if tables:
      everywhere = NamedSharding(self._partitioner.mesh, PartitionSpec())
      draft = jax.device_put(ngram.load(self.draft_path), everywhere)
    else:
      draft = self._restore_half('draft', self.draft_path).params
    return self._state.replace(
      step=target.step,
      params=freeze({'target': target.params, 'draft': draft}),
    )

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
