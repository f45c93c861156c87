# SPDX-License-Identifier: Apache-2.0
"""How a decoder's kernels are stored while it decodes."""

from typing import Any

from flax.core import unfreeze
import jax.numpy as jnp

# See `to_layout`.
LAYOUTS = ('checkpoint', 'fused')
_ATTENTION = ('query', 'key', 'value')


def to_layout(params: Any, layout: str) -> Any:
  """Parameters of a checkpoint as `transformer.network` takes them.

  To be called once, outside the decoding loop.

  Args:
    params: as T5X names them.
    layout: 'checkpoint' leaves them alone. 'fused' joins the decoder's kernels
      that read the same activations: query, key and value of self-attention,
      and a gated block's two input kernels, since a small product costs a CPU
      more to hand to its threads than to compute. Embeddings that are the
      output layer too are transposed for it, as a copy.
  """
  if layout not in LAYOUTS:
    raise ValueError(f'Expected a layout of {LAYOUTS}, got {layout!r}.')
  if layout == 'checkpoint':
    return params
  params = unfreeze(params)  # a copy

  def join(module, name, parts):
    kernels = [module.pop(part)['kernel'] for part in parts]
    module[name] = {'kernel': jnp.concatenate(kernels, axis=1)}

  for name, layer in params['decoder'].items():
    if name.startswith('layers_'):
      mlp = layer['mlp']
      join(layer['self_attention'], 'query_key_value', _ATTENTION)
      join(mlp, 'wi', sorted(part for part in mlp if part.startswith('wi')))
  if 'logits_dense' not in params['decoder']:
    kernel = params['token_embedder']['embedding'].T
    params['decoder']['logits_dense'] = {'kernel': kernel}
  return params
