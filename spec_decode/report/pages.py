# SPDX-License-Identifier: Apache-2.0
"""One README.md and one picture per table and figure, from their records."""

from collections.abc import Sequence
import hashlib
import json
import pathlib
from typing import Any

from PIL import Image

from spec_decode.report import tables
from spec_decode.report.contents import PAGES
from spec_decode.report.contents import markdown

_COMMAND = 'python -m spec_decode.run --gin_file=configs/runs/tables.gin'


def problems(root: str) -> list[str]:
  """What would keep `write` from working."""
  published = pathlib.Path(root) / 'paper'
  if published.is_dir():
    return []
  return [
    f'Expected the published values in {published}, found none. Copy'
    ' experiments/paper there.'
  ]


def expected(root: str) -> dict[pathlib.Path, str]:
  """Path -> text of every README.md, as the records would have it."""
  found = {}
  for name, page in PAGES.items():
    has_records = bool(tables.read(root, name))
    text = (
      f'{page.body(root)}\n\n![{page.title}](picture.png)'
      if has_records
      else 'Not measured yet.'
    )
    found[pathlib.Path(root) / name / 'README.md'] = (
      f'# {page.title}\n\n{page.about}\n\n{text}\n\n'
      f'Made from [records.jsonl](records.jsonl) by `{_COMMAND}`.\n'
    )
  found[pathlib.Path(root) / 'README.md'] = (
    '# Tables and figures of the paper\n\n'
    f'{index(root)}\n\nMade by `{_COMMAND}`; published values are in'
    ' [paper/](paper).\n'
  )
  return found


def index(root: str, folder: str = '') -> str:
  """Every page with what became of its rows; links start with `folder`."""
  return markdown(
    [
      {
        'of the paper': f'[{page.title}]({folder}{name}/README.md)',
        'status': _statuses(root, name),
      }
      for name, page in PAGES.items()
    ]
  )


def _statuses(root: str, name: str) -> str:
  """How many rows have which status."""
  if not tables.read(root, name):
    return 'not run'
  if not name.startswith('table'):
    record = tables.newest(root, name)
    decoded = 'workload' in record['results']
    return tables.status(root, record) if decoded else 'reproduced'
  counts: dict[str, int] = {}
  for row in getattr(tables, name)(root):
    status = row['status'].partition(':')[0]
    counts[status] = counts.get(status, 0) + 1
  return ', '.join(f'{count} {status}' for status, count in counts.items())


def write(root: str) -> None:
  """Writes every README.md and picture that has records."""
  for path, text in expected(root).items():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')
  for name, page in PAGES.items():
    if records := tables.read(root, name):
      page.picture(root).savefig(
        pathlib.Path(root) / name / 'picture.png',
        dpi=110,
        metadata={'Software': None, 'Description': _digest(records)},
      )


def stale(root: str) -> list[str]:
  """Paths that are missing or not what the records say."""
  found = [
    str(path)
    for path, text in expected(root).items()
    if not path.is_file() or path.read_text(encoding='utf-8') != text
  ]
  for name in PAGES:
    picture = pathlib.Path(root) / name / 'picture.png'
    records = tables.read(root, name)
    if records and _shown(picture) != _digest(records):
      found.append(str(picture))
  return found


def _digest(records: Sequence[dict[str, Any]]) -> str:
  """Of all that a picture is drawn from; it is kept inside the file."""
  results = [record['results'] for record in records]
  return hashlib.sha256(json.dumps(results).encode()).hexdigest()


def _shown(picture: pathlib.Path) -> str | None:
  """`_digest` of the records that a picture was drawn from."""
  if not picture.is_file():
    return None
  with Image.open(picture) as image:
    return image.text.get('Description')
