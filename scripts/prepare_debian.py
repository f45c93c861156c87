# SPDX-License-Identifier: Apache-2.0
"""Builds the two-task data set from Debian's package descriptions.

Debian ships an English description of every package, and volunteers translate
them. This script downloads the indices with the system's own `apt-get`, and
makes two tasks in T5's text-to-text form out of them:

*   `en_de`: "translate English to German: ..." (paragraphs and synopses);
*   `synopsis`: "summarize: ..." (the long description to its synopsis).

Pairs are held out by source package, near-duplicates of training text are
removed from the held-out side, and a SentencePiece vocabulary is trained on
the training text. Run it on any Debian system, without root:

    python scripts/prepare_debian.py --output_dir=~/data/debian
"""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import datetime
import hashlib
import io
import json
import pathlib
import re
import subprocess

from absl import app
from absl import flags
from absl import logging
import numpy as np
import sentencepiece as spm

_ASSETS = (
  pathlib.Path(__file__).resolve().parents[1]
  / 'spec_decode'
  / 'assets'
  / 'debian'
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'Where the training files go.', required=True
)
_ASSETS_DIR = flags.DEFINE_string(
  'assets_dir', str(_ASSETS), 'Where the vocabulary and test files go.'
)
_LISTS_DIR = flags.DEFINE_string(
  'lists_dir',
  None,
  'A directory of downloaded apt lists with Translation-de, Translation-en '
  'and InRelease files. If unset, apt-get downloads them.',
)
_MAX_WORDS = flags.DEFINE_integer(
  'max_words', 200, 'Longest side of an En-De pair, in words.'
)
_MAX_RATIO = flags.DEFINE_float(
  'max_ratio',
  2.0,
  'Longest over shortest side of an En-De pair, in characters (20 are added '
  'to both, so that short pairs may differ more).',
)
_MAX_COPIED = flags.DEFINE_float(
  'max_copied',
  0.7,
  'Share of the lower-case words of 4 letters or more on a German side that '
  'also stand on its English side, at most (else it is untranslated).',
)
_MIN_LETTERS = flags.DEFINE_float(
  'min_letters',
  0.6,
  "Least share of letters (in runs of two or more) among a source side's "
  'characters but spaces; less is a table, a drawing or code.',
)
_MIN_DESCRIPTION_WORDS = flags.DEFINE_integer(
  'min_description_words', 8, 'Shortest long description, in words.'
)
_MAX_SYNOPSIS_WORDS = flags.DEFINE_integer(
  'max_synopsis_words', 30, 'Longest synopsis, in words.'
)
_TRUNCATE_WORDS = flags.DEFINE_integer(
  'truncate_words', 150, 'Long descriptions are cut after so many words.'
)
_TEST_SIZE = flags.DEFINE_integer('test_size', 1000, 'Test pairs of each task.')
_HELD_OUT = flags.DEFINE_float(
  'held_out', 0.08, 'Share of the source packages that is held out.'
)
_MIN_TEST_WORDS = flags.DEFINE_integer(
  'min_test_words', 4, 'Shortest source side of a held-out pair, in words.'
)
_MAX_PER_PACKAGE = flags.DEFINE_integer(
  'max_per_package', 4, 'Most held-out pairs of a source package and task.'
)
_MAX_SHARED = flags.DEFINE_float(
  'max_shared',
  0.8,
  'A held-out pair is removed if a training source side shares this part of '
  'its tokens, or more.',
)
_VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 8000, 'Number of pieces.')

_PREFIX = {
  'en_de': 'translate English to German: ',
  'synopsis': 'summarize: ',
}
_KEYRING = 'debian-archive-keyring'
_APT_HELPER = '/usr/lib/apt/apt-helper'
_COMMAND = 'python scripts/prepare_debian.py --output_dir=~/data/debian'


@dataclasses.dataclass(frozen=True)
class Pair:
  """One example, with the package and the source package it comes from."""

  uid: str
  package: str
  group: str
  source: str
  target: str


# --- Download -----------------------------------------------------------------


def parse_stanzas(text: str) -> Iterator[dict[str, str]]:
  """Yields the stanzas of a control file as dictionaries.

  Args:
    text: The control file.

  Yields:
    Field names (lower case) to values; continuation lines keep the leading
    space and are separated by newlines.
  """
  for block in re.split(r'\n[ \t]*\n', text):
    fields, name = {}, None
    for line in block.split('\n'):
      if line.startswith('#') or not line.strip():
        continue
      if line[0] in ' \t':
        if name:
          fields[name] += '\n' + line
      elif ':' in line:
        name, value = line.split(':', 1)
        name = name.lower()
        fields[name] = value.strip()
    if fields:
      yield fields


def _parse_one_line(line: str) -> dict[str, str] | None:
  """Parses an entry of sources.list into the fields of a .sources stanza."""
  match = re.match(r'deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)', line)
  if not match:
    return None
  options = dict(o.split('=', 1) for o in (match[1] or '').split() if '=' in o)
  return {
    'types': 'deb',
    'uris': match[2],
    'suites': match[3],
    'components': match[4],
    'signed-by': options.get('signed-by', ''),
  }


def debian_sources(etc: pathlib.Path) -> list[str]:
  """Finds the system's entries of the Debian archive itself.

  Args:
    etc: The directory of sources.list and sources.list.d.

  Returns:
    One-line entries of the component main alone. Third-party entries are left
    out, and the keyring is named, so that apt checks the others' signatures.
  """
  stanzas = []
  for path in [etc / 'sources.list', *sorted(etc.glob('sources.list.d/*'))]:
    if path.suffix == '.list' and path.exists():
      lines = path.read_text().splitlines()
      stanzas.extend(filter(None, map(_parse_one_line, lines)))
    elif path.suffix == '.sources':
      stanzas.extend(parse_stanzas(path.read_text()))
  default = sorted(
    pathlib.Path('/usr/share/keyrings').glob(_KEYRING + '.[gp]*')
  )
  entries = []
  for s in stanzas:
    signed = s.get('signed-by', '')
    uris = s.get('uris', '').split()
    ours = _KEYRING in signed if signed else True
    enabled = s.get('enabled', 'yes').lower() not in ('no', 'false')
    if not (ours and enabled and 'deb' in s.get('types', '').split()):
      continue
    if 'main' not in s.get('components', '').split():
      continue
    keyring = signed or (str(default[0]) if default else '')
    option = f'[signed-by={keyring}] ' if keyring else ''
    for uri in uris:
      if not signed and not re.search(r'/debian(-security)?(/|$)', uri):
        continue
      for suite in s.get('suites', '').split():
        entries.append(f'deb {option}{uri} {suite} main')
  return sorted(set(entries))


def download_lists(root: pathlib.Path) -> pathlib.Path:
  """Runs `apt-get update` in directories of its own; returns the lists."""
  lists, cache = root / 'lists', root / 'cache'
  for path in (lists / 'partial', cache / 'archives' / 'partial'):
    path.mkdir(parents=True, exist_ok=True)
  entries = debian_sources(pathlib.Path('/etc/apt'))
  if not entries:
    raise ValueError('No Debian archive entry with the component main found.')
  sources = root / 'sources.list'
  sources.write_text(''.join(e + '\n' for e in entries))
  options = {
    'Acquire::Languages': 'de,en',
    'Dir::State::Lists': lists,
    'Dir::Cache': cache,
    'Dir::Etc::sourcelist': sources,
    'Dir::Etc::sourceparts': '/dev/null',
    'APT::Sandbox::User': 'root',
  }
  command = ['apt-get', 'update', '--quiet']
  for key, value in options.items():
    command += ['-o', f'{key}={value}']
  code = subprocess.run(command, check=False).returncode
  if code:
    logging.warning('apt-get ended with %d; going on with what it got.', code)
  return lists


def read_index(path: pathlib.Path) -> str:
  """Returns the text of an index, whatever its compression."""
  command = [_APT_HELPER, 'cat-file', str(path)]
  raw = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
  return raw.decode('utf-8', errors='replace')


def find_indices(
  lists: pathlib.Path,
) -> tuple[dict[str, list[pathlib.Path]], list[dict[str, str]]]:
  """Finds the indices of Debian's component main.

  Args:
    lists: A directory of apt lists.

  Returns:
    The paths by kind ("de", "en", "packages"), and the Release fields of the
    archives that they belong to.
  """
  indices, releases = {'de': [], 'en': [], 'packages': []}, []
  for release in sorted(lists.glob('*Release')):
    prefix = release.name.removesuffix('Release').removesuffix('In')
    text = release.read_text(encoding='utf-8', errors='replace')
    text = text.split('\n\n', 1)[-1] if text.startswith('-----') else text
    fields = next(parse_stanzas(text), {})
    if fields.get('origin') != 'Debian':
      logging.warning("%s is not Debian's; left out.", release.name)
      continue
    found = {
      'de': sorted(lists.glob(f'{prefix}main_i18n_Translation-de*')),
      'en': sorted(lists.glob(f'{prefix}main_i18n_Translation-en*')),
      'packages': sorted(lists.glob(f'{prefix}main_binary-*_Packages*')),
    }
    for kind, paths in found.items():
      indices[kind] += [p for p in paths if p not in indices[kind]]
    releases.append(fields)
  if not (indices['de'] and indices['en']):
    raise ValueError(f'No Translation-de and Translation-en in {lists}.')
  return indices, releases


# --- Pairs --------------------------------------------------------------------


def _repair(text: str) -> str:
  """Undoes UTF-8 that was read as Latin-1 before it was uploaded."""
  return re.sub(
    '[\u00c3\u00c2][\u0080-\u00bf]',
    lambda m: m[0].encode('latin-1').decode('utf-8'),
    text,
  )


def split_description(value: str) -> list[str]:
  """Splits a Description field into its synopsis and its paragraphs.

  Args:
    value: The field, with the continuation lines' leading spaces.

  Returns:
    The synopsis, then every paragraph with its lines joined by spaces. The
    items of an indented list start with "*".
  """
  value = re.sub('[\u200b\u00ad\ufeff]', '', value)
  value = re.sub(r'([=~_*#+-])\1{3,}', ' ', value)
  synopsis, *lines = _repair(value).split('\n')
  parts, current = [], []
  for line in lines:
    line = line[1:].rstrip()
    if line in ('', '.'):
      parts.append(' '.join(current))
      current = []
    else:
      line = re.sub(r'^\s*[*•·]\s+|^\s+[-+o–]\s+', '* ', line)
      current.append(line.strip())
  parts.append(' '.join(current))
  parts = [synopsis, *(p for p in parts if p)]
  return [re.sub(r'\s+', ' ', p).strip() for p in parts]


def normalise_source(name: str) -> str:
  """Strips versions, and parts that sibling packages differ in."""
  name = name.lower()
  name = re.sub(r'-(dev|doc|docs|dbg|data|common|bin|utils|tools)$', '', name)
  name = re.sub(r'[-.]?\d[\d.]*[a-z]?\d*$', '', name)
  return name.removeprefix('lib') or name


def read_sources(paths: Iterable[pathlib.Path]) -> dict[str, str]:
  """Maps binary packages to source packages from the Packages indices."""
  sources = {}
  for path in paths:
    package = None
    for line in read_index(path).splitlines():
      if line.startswith('Package: '):
        package = line[9:].strip()
        sources.setdefault(package, package)
      elif line.startswith('Source: '):
        sources[package] = line[8:].split('(')[0].strip()
  return sources


def read_descriptions(
  paths: Iterable[pathlib.Path], language: str
) -> dict[str, tuple[str, list[str]]]:
  """Reads Translation files; returns md5 to (package, parts)."""
  out, field = {}, f'description-{language}'
  for path in paths:
    for stanza in parse_stanzas(read_index(path)):
      if field in stanza and 'description-md5' in stanza:
        parts = split_description(stanza[field])
        out.setdefault(stanza['description-md5'], (stanza['package'], parts))
  return out


def _few_letters(text: str) -> bool:
  """Says whether a text is a table, a drawing or code rather than prose."""
  characters = re.sub(r'\s', '', text)
  letters = sum(map(len, re.findall(r'[^\W\d_]{2,}', text)))
  return letters < _MIN_LETTERS.value * len(characters)


def _long_words(text: str) -> list[str]:
  """Returns the lower-case words of four letters or more."""
  return re.findall(r'(?<![\w./-])[^\W\d_A-Z]{4,}(?![\w./-])', text)


def en_de_filter(en: str, de: str) -> str | None:
  """Names the filter that drops a pair, or None if it stays."""
  if not en or not de or not re.search(r'[^\W\d_]{2}', de):
    return 'empty'
  if '<trans>' in de.lower() or '\ufffd' in en + de:
    return 'placeholder or broken encoding'
  if en == de:
    return 'identical'
  if max(len(en.split()), len(de.split())) > _MAX_WORDS.value:
    return 'too long'
  if _ratio(en, de) > _MAX_RATIO.value:
    return 'length ratio'
  if de.count('»') != de.count('«'):
    return 'unbalanced quotes (text lost)'
  if _few_letters(en):
    return 'few letters'
  words, known = _long_words(de), set(_long_words(en))
  copied = sum(w in known for w in words)
  if len(words) >= 4 and copied > _MAX_COPIED.value * len(words):
    return 'untranslated'
  return None


def _ratio(en: str, de: str) -> float:
  """Returns the longer over the shorter text, smoothed for short ones."""
  lengths = len(en) + 20, len(de) + 20
  return max(lengths) / min(lengths)


def synopsis_filter(description: str, synopsis: str) -> str | None:
  """Names the filter that drops a pair, or None if it stays."""
  if not description or not synopsis:
    return 'empty'
  if '\ufffd' in description + synopsis:
    return 'placeholder or broken encoding'
  if description.casefold().rstrip('.') == synopsis.casefold().rstrip('.'):
    return 'identical'
  if len(description.split()) < _MIN_DESCRIPTION_WORDS.value:
    return 'short description'
  if _few_letters(description):
    return 'few letters'
  if len(synopsis.split()) > _MAX_SYNOPSIS_WORDS.value:
    return 'too long'
  return None


def make_pairs(
  en: Mapping[str, tuple[str, list[str]]],
  de: Mapping[str, tuple[str, list[str]]],
  sources: Mapping[str, str],
) -> tuple[dict[str, list[Pair]], dict[str, collections.Counter[str]]]:
  """Makes the filtered pairs of both tasks, and counts what was removed."""
  pairs = {'en_de': [], 'synopsis': []}
  removed = {'en_de': collections.Counter(), 'synopsis': collections.Counter()}

  def add(task, reason, *args):
    if reason:
      removed[task][reason] += 1
    else:
      pairs[task].append(Pair(*args))

  for md5, (package, parts) in sorted(en.items(), key=lambda x: (x[1], x[0])):
    group = normalise_source(sources.get(package, package))
    uid = f'{package}:{md5[:8]}'
    words = ' '.join(parts[1:]).split()
    text = ' '.join(words[: _TRUNCATE_WORDS.value])
    reason = synopsis_filter(text, parts[0])
    add('synopsis', reason, uid, package, group, text, parts[0])
    if md5 not in de:
      continue
    german = de[md5][1]
    if len(german) != len(parts):
      removed['en_de']['paragraph counts differ'] += len(parts) - 1
      parts, german = parts[:1], german[:1]
    for i, (a, b) in enumerate(zip(parts, german, strict=True)):
      add('en_de', en_de_filter(a, b), f'{uid}:{i}', package, group, a, b)
  return pairs, removed


# --- Split --------------------------------------------------------------------


def _hash(text: str) -> int:
  return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


def is_held_out(group: str) -> bool:
  """Says whether a source package is held out, by a fixed hash of its name."""
  return _hash('held-out:' + group) < _HELD_OUT.value * 16**12


def unique(pairs: Iterable[Pair], by_source: bool = False) -> list[Pair]:
  """Keeps the first of equal pairs (or of pairs with equal source sides)."""
  seen = {}
  for p in pairs:
    seen.setdefault(p.source if by_source else (p.source, p.target), p)
  return list(seen.values())


def tokens(text: str) -> list[str]:
  """Returns the lower-case words, digits normalised to 0."""
  return re.findall(r'\w+', re.sub(r'\d+', '0', text.lower()))


def shared_parts(queries: Sequence[str], texts: Sequence[str]) -> np.ndarray:
  """Finds how much of each query one of the texts holds, at most.

  Args:
    queries: The held-out source sides.
    texts: The training source sides.

  Returns:
    For each query the largest |multiset intersection| / |query| over texts.
  """
  wanted = set()
  counts = [collections.Counter(tokens(q)) for q in queries]
  for c in counts:
    wanted.update(c)
  postings = {w: ([], []) for w in wanted}
  for i, text in enumerate(texts):
    for word, n in collections.Counter(tokens(text)).items():
      if word in wanted:
        postings[word][0].append(i)
        postings[word][1].append(n)
  arrays = {w: (np.array(i), np.array(n)) for w, (i, n) in postings.items()}
  out = np.zeros(len(queries))
  for k, c in enumerate(counts):
    common = np.zeros(len(texts), np.int32)
    for word, n in c.items():
      where, there = arrays[word]
      if len(where):
        common[where] += np.minimum(there, n)
    out[k] = common.max(initial=0) / max(1, c.total())
  return out


def split(
  pairs: Sequence[Pair], removed: collections.Counter[str]
) -> tuple[list[Pair], list[Pair]]:
  """Splits a task's pairs into training pairs and clean held-out pairs.

  Args:
    pairs: All pairs of the task.
    removed: Counts of removed pairs, added to in place.

  Returns:
    The training pairs, and the held-out pairs in the order of their source
    packages' hashes.
  """
  train = [p for p in pairs if not is_held_out(p.group)]
  held = [p for p in pairs if is_held_out(p.group)]
  sizes = len(train), len(held)
  train, held = unique(train), unique(held, by_source=True)
  removed['duplicate in training'] += sizes[0] - len(train)
  removed['duplicate in held-out'] += sizes[1] - len(held)
  size = len(held)
  held = [p for p in held if len(p.source.split()) >= _MIN_TEST_WORDS.value]
  removed['held-out with too few words'] += size - len(held)
  shared = shared_parts([p.source for p in held], [p.source for p in train])
  size = len(held)
  keep = shared < _MAX_SHARED.value
  held = [p for p, k in zip(held, keep, strict=True) if k]
  removed['held-out near-duplicate of training'] += size - len(held)
  held.sort(key=lambda p: (_hash(p.group), p.group, _hash(p.uid)))
  taken, capped = collections.Counter(), []
  for p in held:
    taken[p.group] += 1
    if taken[p.group] <= _MAX_PER_PACKAGE.value:
      capped.append(p)
  removed['held-out over the cap per package'] += len(held) - len(capped)
  return train, capped


# --- Vocabulary ---------------------------------------------------------------


def vocabulary_text(train: Mapping[str, Sequence[Pair]]) -> list[str]:
  """Returns the lines that the vocabulary is trained on.

  Both sides of all training pairs; but every third long description only, as
  English would outweigh German else.

  Args:
    train: The training pairs by task.
  """
  lines = []
  for p in train['en_de']:
    lines += [p.source, p.target]
  for i, p in enumerate(train['synopsis']):
    lines.append(p.target)
    if i % 3 == 0:
      lines.append(p.source)
  return list(dict.fromkeys(lines))


def train_vocabulary(lines: Sequence[str], path: pathlib.Path) -> None:
  """Trains the SentencePiece vocabulary with T5's special ids."""
  model = io.BytesIO()  # A path would be stored in the model.
  spm.SentencePieceTrainer.Train(
    sentence_iterator=iter(lines),
    model_writer=model,
    model_type='unigram',
    vocab_size=_VOCAB_SIZE.value,
    hard_vocab_limit=True,
    character_coverage=0.9999,
    byte_fallback=True,
    normalization_rule_name='nmt_nfkc',
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    num_threads=2,  # Another number would round otherwise.
    minloglevel=1,
  )
  path.write_bytes(model.getvalue())


def token_statistics(
  vocab: pathlib.Path, files: Mapping[str, Sequence[Mapping[str, str]]]
) -> list[str]:
  """Returns a Markdown table of the token counts of each file and side."""
  model = spm.SentencePieceProcessor(model_file=str(vocab))
  rows = [
    '| file | side | mean | median | 95 % | longest |',
    '| --- | --- | --- | --- | --- | --- |',
  ]
  for name, examples in files.items():
    for side in ('inputs', 'targets'):
      ids = model.encode([e[side] for e in examples])
      n = np.array([len(i) for i in ids])
      median, high = np.percentile(n, [50, 95])
      rows.append(
        f'| {name} | {side} | {n.mean():.1f} | {median:.0f} | {high:.0f} '
        f'| {n.max()} |'
      )
  return rows


# --- Output -------------------------------------------------------------------


def to_examples(
  task: str, pairs: Iterable[Pair], with_package: bool = False
) -> list[dict[str, str]]:
  """Turns pairs into the examples that are written."""
  examples = []
  for p in pairs:
    example = {
      'id': f'{task}:{p.uid}',
      'inputs': _PREFIX[task] + p.source,
      'targets': p.target,
    }
    if with_package:
      example['package'] = p.package
    examples.append(example)
  return examples


def write_jsonl(path: pathlib.Path, examples: Iterable[Mapping[str, str]]):
  """Writes one JSON object a line."""
  with path.open('w', encoding='utf-8') as f:
    for example in examples:
      f.write(json.dumps(example, ensure_ascii=False) + '\n')


def _readme_sections(
  releases: Sequence[Mapping[str, str]],
  files: Mapping[pathlib.Path, int | None],
  removed: Mapping[str, Mapping[str, int]],
  statistics: Sequence[str],
) -> Iterator[str]:
  """Yields the generated sections of the README."""
  yield '## Indices\n'
  for r in releases:
    yield (
      f'*   Debian {r.get("version", "")} {r.get("codename", "")} '
      f'({r.get("suite", "")}), main; index of {r.get("date", "")}'
    )
  day = datetime.datetime.now(datetime.UTC).date()
  yield f'\nRead on {day}.\n\n## Files\n'
  yield '| file | pairs | sha256 |\n| --- | --- | --- |'
  for path, size in files.items():
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    yield f'| {path.name} | {"" if size is None else size} | {digest} |'
  yield '\n## Removed\n\n| task | filter | pairs |\n| --- | --- | --- |'
  for task, counts in removed.items():
    for reason, n in counts.items():
      yield f'| {task} | {reason} | {n} |'
  yield '\n## Tokens\n'
  yield from statistics


def _readme_head() -> str:
  """Returns the fixed part of the README."""
  return f"""# Debian descriptions: vocabulary and test sets

Made by `{_COMMAND}`.
The training and validation files are written by the same command, and are not
part of the repository.

*   `en_de`: "{_PREFIX['en_de']}...", synopses and paragraphs of package
    descriptions, paired by Description-md5 where the numbers of paragraphs
    agree. The lines of a paragraph are joined; list items start with "*".
*   `synopsis`: "{_PREFIX['synopsis']}...", the long English description, cut
    after {_TRUNCATE_WORDS.value} words, to the one-line synopsis.

Limits: at most {_MAX_WORDS.value} words a side (en_de), a length ratio of at
most {_MAX_RATIO.value}, at most {_MAX_COPIED.value:.0%} of the German words
copied from the English side; at least {_MIN_DESCRIPTION_WORDS.value} words of
description and at most {_MAX_SYNOPSIS_WORDS.value} of synopsis (synopsis);
at least {_MIN_LETTERS.value:.0%} letters, in runs of two or more, on the
source side (both).

Split: {_HELD_OUT.value:.0%} of the source packages, chosen by a hash of the
name without its version, are held out of both tasks. A held-out pair is
removed if one training source side of its task shares
{_MAX_SHARED.value:.0%} or more of its tokens (multisets of lower-case words,
digits as 0). At most {_MAX_PER_PACKAGE.value} pairs of a source package
remain, each with at least {_MIN_TEST_WORDS.value} words on the source side.
The first {_TEST_SIZE.value} pairs of each task are the test set; pairs of
held-out packages without a test pair are the validation files.

`vocab.model` is a SentencePiece unigram vocabulary of {_VOCAB_SIZE.value}
pieces (byte fallback, nmt_nfkc, pad 0, eos 1, unk 2, no bos), trained on both
sides of the training pairs of both tasks.

## Licence

The descriptions are part of the packages of Debian main, and free under each
package's own terms (`/usr/share/doc/PACKAGE/copyright`); the field `package`
names it. The translations are the work of the Debian Description Translation
Project (DDTP) and its volunteers.
"""


def main(argv: Sequence[str]) -> None:
  """Downloads, pairs, splits and writes the data."""
  if len(argv) > 1:
    raise app.UsageError('Too many arguments.')
  output = pathlib.Path(_OUTPUT_DIR.value).expanduser().resolve()
  assets = pathlib.Path(_ASSETS_DIR.value).expanduser()
  for path in (output, assets):
    path.mkdir(parents=True, exist_ok=True)
  if _LISTS_DIR.value:
    lists = pathlib.Path(_LISTS_DIR.value).expanduser()
  else:
    lists = download_lists(output / 'apt')
  indices, releases = find_indices(lists)
  en = read_descriptions(indices['en'], 'en')
  de = read_descriptions(indices['de'], 'de')
  sources = read_sources(indices['packages'])
  print(f'{len(en)} English and {len(de)} German descriptions.')
  pairs, removed = make_pairs(en, de, sources)
  train, held = {}, {}
  for task in pairs:
    train[task], held[task] = split(pairs[task], removed[task])
    print(task, len(train[task]), 'training and', len(held[task]), 'held out')
    for reason, n in removed[task].items():
      print(f'  removed: {reason}: {n}')
    if len(held[task]) < _TEST_SIZE.value:
      raise ValueError(f'Too few held-out pairs of {task}; raise --held_out.')
  write_all(output, assets, releases, train, held, removed)


def write_all(
  output: pathlib.Path,
  assets: pathlib.Path,
  releases: Sequence[Mapping[str, str]],
  train: Mapping[str, Sequence[Pair]],
  held: Mapping[str, Sequence[Pair]],
  removed: Mapping[str, Mapping[str, int]],
) -> None:
  """Writes the training, validation and test files, vocabulary and README."""
  examples = {}
  size = _TEST_SIZE.value
  tested = {p.group for pairs in held.values() for p in pairs[:size]}
  for task, pairs in held.items():
    test, rest = pairs[:size], pairs[size:]
    valid = [p for p in rest if p.group not in tested]
    examples[output / f'train_{task}.jsonl'] = to_examples(task, train[task])
    examples[output / f'valid_{task}.jsonl'] = to_examples(task, valid)
    examples[assets / f'{task}_test.jsonl'] = to_examples(task, test, True)
  for path, content in examples.items():
    write_jsonl(path, content)
    print(path, len(content))
  vocab = assets / 'vocab.model'
  train_vocabulary(vocabulary_text(train), vocab)
  statistics = token_statistics(
    vocab, {path.name: content for path, content in examples.items()}
  )
  print(*statistics, sep='\n')
  sizes = {vocab: None, **{path: len(c) for path, c in examples.items()}}
  sections = _readme_sections(releases, sizes, removed, statistics)
  readme = '\n'.join([_readme_head(), *sections]) + '\n'
  (assets / 'README.md').write_text(readme, encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
