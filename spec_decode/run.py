# SPDX-License-Identifier: Apache-2.0
"""python -m spec_decode.run --gin_file=configs/runs/quickstart.gin

Flags as T5X has them: --gin_file (may be repeated), --gin_search_paths, and
--gin.NAME=value for single bindings.
"""

from collections.abc import Sequence
import sys

from absl import app
from absl import flags

from spec_decode import experiment

_FILES = flags.DEFINE_multi_string('gin_file', [], 'Gin files, in order.')
_PATHS = flags.DEFINE_list(
  'gin_search_paths', ['.'], 'Folders that gin files are looked up in.'
)
_BINDINGS = flags.DEFINE_multi_string(
  'gin_bindings', [], 'Single bindings; --gin.NAME=value is short for this.'
)


def _expand(argv: Sequence[str]) -> list[str]:
  """Turns --gin.NAME=value into --gin_bindings=NAME=value."""
  prefix = '--gin.'
  return [
    '--gin_bindings=' + a.removeprefix(prefix) if a.startswith(prefix) else a
    for a in argv
  ]


def main(argv: Sequence[str]) -> None:
  try:
    if len(argv) > 1:
      raise experiment.ConfigError(f'Unknown arguments: {argv[1:]}')
    if not _FILES.value:
      raise experiment.ConfigError(
        'Expected --gin_file=..., got none. configs/runs has examples.'
      )
    experiment.parse(_FILES.value, _BINDINGS.value, _PATHS.value)
    experiment.main()
  except experiment.ConfigError as error:
    print(f'Refused: {error}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
  app.run(main, argv=_expand(sys.argv))
