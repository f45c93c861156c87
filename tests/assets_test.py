# SPDX-License-Identifier: Apache-2.0
"""What ships is what its descriptions say, and small enough to ship."""

import hashlib
import pathlib
import re

ASSETS = pathlib.Path(__file__).parents[1] / 'spec_decode' / 'assets'
DEBIAN = ASSETS / 'debian'
# A row of a Markdown table: file, anything, sha256 at the end.
ROW = re.compile(r'^\| (\S+) \|(.*)\| ([0-9a-f]{64}) \|$', re.MULTILINE)


def check(page):
  """Compares all rows of a page with the files; returns their names."""
  rows = ROW.findall((DEBIAN / page).read_text(encoding='utf-8'))
  found = set()
  for name, rest, digest in rows:
    # Training files are described, but do not ship.
    if name.startswith(('train_', 'valid_')):
      continue
    content = (DEBIAN / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == digest, name
    if page == 'MODELS.md':
      (size,) = re.findall(r'([\d.]+) MB', rest)
      assert size == f'{len(content) / 1e6:.1f}', name
    found.add(name)
  return found


def test_every_file_of_weights_has_its_hash_and_size_in_models():
  shipped = {path.name for path in DEBIAN.glob('*.safetensors')}
  assert check('MODELS.md') == shipped


def test_every_other_file_has_its_hash_in_the_readme():
  shipped = {path.name for path in DEBIAN.iterdir()}
  others = {name for name in shipped if not name.endswith('.safetensors')}
  assert check('README.md') == others - {'README.md', 'MODELS.md'}


def test_assets_stay_small():
  sizes = {
    path.name: path.stat().st_size
    for path in ASSETS.rglob('*')
    if path.is_file()
  }
  assert len(sizes) > 10
  assert {name for name, size in sizes.items() if size > 45e6} == set()
  assert sum(sizes.values()) <= 60e6
