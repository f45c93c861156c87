# SPDX-License-Identifier: Apache-2.0
"""Stock T5X decoding as a function, to be compared with."""

from collections.abc import Callable
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import seqio
from t5x import decoding
from t5x import models
from t5x.examples.t5 import layers
from t5x.examples.t5 import network

Array = jax.Array


def decoder(
  config: Any, length: int, eos_id: int, temperature: float, one_hot: bool
) -> Callable[[Any, Array], Array]:
  """T5X's network under T5X's `temperature_sample`, compiled.

  Args:
    config: the sizes; a `transformer.T5Config` will do.
    length: new tokens at most.
    eos_id: ends a row.
    temperature: 0 is argmax.
    one_hot: embed as stock does, by a product with one-hot rows, which costs
      as much as the output layer. False looks the rows up instead.

  Returns:
    (params at rest, inputs [B, I]) -> tokens [B, length], zeros after EOS.
  """
  sizes = {
    name: getattr(config, name)
    for name in network.T5Config.__dataclass_fields__
    if name != 'dtype'
  }
  config = network.T5Config(dtype=jnp.dtype(config.dtype), **sizes)
  vocabulary = seqio.PassThroughVocabulary(config.vocab_size, eos_id)
  sample = functools.partial(
    decoding.temperature_sample, temperature=temperature, topk=0
  )
  model = models.EncoderDecoderModel(
    network.Transformer(config), vocabulary, vocabulary, None, sample
  )

  make = layers.Embed
  embed = lambda **fields: make(**fields | {'one_hot': one_hot})

  @jax.jit
  def decode(params, inputs):
    features = {
      'encoder_input_tokens': inputs,
      'decoder_input_tokens': jnp.zeros((inputs.shape[0], length), jnp.int32),
    }
    # T5X's network has no setting for this; tracing is when it is asked.
    with mock.patch.object(layers, 'Embed', embed):
      return model.predict_batch(params, features)

  return decode
