# SPDX-License-Identifier: Apache-2.0
"""How a decoder's kernels are stored while it decodes."""

from collections.abc import Sequence
from typing import Any

from flax.core import unfreeze
import jax
import jax.numpy as jnp

from spec_decode.models import layers

# See `to_layout`.
LAYOUTS = ('checkpoint', 'fused')
_ATTENTION = ('query', 'key', 'value')


def to_layout(params: Any, layout: str, shortlist: Sequence[int] = ()) -> Any:
  """Parameters of a checkpoint as `transformer.network` takes them.

  To be called once, outside the decoding loop.

  Args:
    params: as T5X names them.
    layout: 'checkpoint' leaves them alone. 'fused' joins the decoder's kernels
      that read the same activations: query, key and value of self-attention,
      and a gated block's two input kernels, since a small product costs a CPU
      more to hand to its threads than to compute; and stores all of the
      decoder's kernels as `layers.few_rows_kernel` returns them. Embeddings
      that are the output layer too are copied for it.
    shortlist: ids in ascending order, for a draft: all others get no logits
      but -inf, and their columns of the output layer are left out.
  """
  if layout not in LAYOUTS:
    raise ValueError(f'Expected a layout of {LAYOUTS}, got {layout!r}.')
  params = unfreeze(params)  # a copy
  decoder = params['decoder']
  if layout == 'fused':
    _fuse(decoder)
  if 'logits_dense' not in decoder and (layout == 'fused' or shortlist):
    kernel = params['token_embedder']['embedding'].T
    decoder['logits_dense'] = {'kernel': kernel}
  if shortlist:
    ids = jnp.array(shortlist, jnp.int32)
    decoder['logits_dense'] = {
      'kernel': decoder['logits_dense']['kernel'][:, ids]
    }
    decoder['shortlist'] = ids
  if layout == 'fused':
    params['decoder'] = jax.tree_util.tree_map_with_path(_turn, decoder)
  return params


def _turn(path: Any, weights: Any) -> Any:
  """Kernels as products of few rows take them, other weights as they are."""
  is_kernel = path[-1].key == 'kernel'
  return layers.few_rows_kernel(weights) if is_kernel else weights


def _fuse(decoder: Any) -> None:
  """Joins the kernels, in place."""

  def join(module, name, parts):
    kernels = [module.pop(part)['kernel'] for part in parts]
    module[name] = {'kernel': jnp.concatenate(kernels, axis=1)}

  for name, layer in decoder.items():
    if name.startswith('layers_'):
      mlp = layer['mlp']
      join(layer['self_attention'], 'query_key_value', _ATTENTION)
      join(mlp, 'wi', sorted(part for part in mlp if part.startswith('wi')))
