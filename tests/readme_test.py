# SPDX-License-Identifier: Apache-2.0
"""What README.md says runs, and what it names exists."""

import json
import pathlib
import re

import checkpoints_test

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')


def test_the_python_example_decodes(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for seed, folder in enumerate(('t5-large', 't5-small')):
    directory = tmp_path / folder
    directory.mkdir()
    sizes = checkpoints_test.HF_SIZES | {'model_type': 't5'}
    (directory / 'config.json').write_text(json.dumps(sizes))
    arrays = checkpoints_test.random_arrays(checkpoints_test.TIED, seed)
    stored = checkpoints_test.hf_file(arrays)
    checkpoints_test.write(directory / 'model.safetensors', stored)
  (code,) = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
  names = {}
  exec(compile(code, 'README.md', 'exec'), names)
  result = names['result']
  assert result.tokens.shape == (1, 64)
  assert result.histogram.sum() == result.target_calls[0] >= 1


def test_links_and_gin_files_exist():
  prose = re.sub(r'```.*?```', '', README, flags=re.DOTALL)
  links = re.findall(r'\]\((?!http)([^)]+)\)', prose)
  files = re.findall(r'configs/[\w/]+\.gin', README)
  missing = [path for path in links + files if not (ROOT / path).exists()]
  assert not missing
