# SPDX-License-Identifier: Apache-2.0
"""A complete workload that decodes in a moment: random weights, real text."""

import json

from spec_decode import workload
from spec_decode.data import text
from spec_decode.models import transformer


def network(name='tiny', layers=1, checkpoint=None, **changes):
  sizes = dict(
    vocab_size=8064,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    num_encoder_layers=1,
    num_decoder_layers=layers,
    mlp_dim=32,
    mlp_activations=('gelu', 'linear'),
  )
  config = transformer.T5Config(**(sizes | changes))
  return workload.Network(name, config, checkpoint, vocab_size=8000)


def examples(path, number=3):
  """Writes a JSONL source of `number` different examples."""
  lines = [
    {
      'id': f'example {i}',
      'inputs': 'translate English to German: ' + 'small tools ' * (i + 1),
      'targets': 'kleine Werkzeuge ' * (i + 1),
    }
    for i in range(number)
  ]
  path.write_text('\n'.join(json.dumps(line) for line in lines) + '\n')
  return path


def make(tmp_path, number=3, **changes):
  """A workload over `number` examples."""
  source = examples(tmp_path / 'examples.jsonl', number)
  settings = dict(
    target=network(),
    draft=network('tiny draft'),
    prompts=text.Prompts('tiny', str(source), input_length=24),
    gamma=2,
    max_new_tokens=6,
    batch_size=2,
  )
  return workload.Workload(**(settings | changes))
