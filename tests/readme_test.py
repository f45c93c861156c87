# SPDX-License-Identifier: Apache-2.0
"""What README.md says runs, and what it names exists."""

import pathlib
import re

import jax.numpy as jnp
import toy_models as toy

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')


def test_the_python_example_decodes():
  (code,) = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
  model = toy.table_model(5)
  names = {
    'target': model,
    'draft': model,
    'params': toy.table_params(0, 5),
    'draft_params': toy.table_params(1, 5),
    'inputs': jnp.arange(3)[:, None],
    'ids': jnp.arange(3),
  }
  exec(compile(code, 'README.md', 'exec'), names)
  result = names['result']
  assert jnp.all(result.length >= 1)
  assert jnp.all(result.histogram.sum(1) == result.target_calls)


def test_links_and_gin_files_exist():
  prose = re.sub(r'```.*?```', '', README, flags=re.DOTALL)
  links = re.findall(r'\]\((?!http)([^)]+)\)', prose)
  files = re.findall(r'configs/[\w/]+\.gin', README)
  missing = [path for path in links + files if not (ROOT / path).exists()]
  assert not missing
