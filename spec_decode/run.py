# SPDX-License-Identifier: Apache-2.0
"""python -m spec_decode.run --gin_file=configs/runs/quickstart.gin

Flags as T5X has them: --gin_file (may be repeated), --gin_search_paths, and
--gin.NAME=value for single bindings. Gin files for `t5x.infer` and `t5x.eval`
run here as they do there.
"""

from collections.abc import Callable
from collections.abc import Sequence
import importlib
import sys

from absl import app
from absl import flags
import jax

from spec_decode import configuration
from spec_decode import experiment

_FILES = flags.DEFINE_multi_string('gin_file', [], 'Gin files, in order.')
_PATHS = flags.DEFINE_list(
  'gin_search_paths', ['.'], 'Folders that gin files are looked up in.'
)
_BINDINGS = flags.DEFINE_multi_string(
  'gin_bindings', [], 'Single bindings; --gin.NAME=value is short for this.'
)
_PROCESSES = flags.DEFINE_list(
  'distributed',
  None,
  '"auto" on TPU pods and Slurm, else host:port,count,index.',
)
# T5X's gin files take these from `__main__`, which is this module.
_T5X = {'infer': 't5x.infer', 'evaluate': 't5x.eval'}
_called: list[Callable] = []


def __getattr__(name: str) -> Callable:
  """T5X's entry points, imported when a gin file speaks of them."""
  if name not in _T5X:
    raise AttributeError(name)
  entry = getattr(importlib.import_module(_T5X[name]), name)
  _called.append(entry)
  return entry


def _expand(argv: Sequence[str]) -> list[str]:
  """Turns --gin.NAME=value into --gin_bindings=NAME=value."""
  prefix = '--gin.'
  return [
    '--gin_bindings=' + a.removeprefix(prefix) if a.startswith(prefix) else a
    for a in argv
  ]


def _join(address: str, count: str = '', index: str = '') -> None:
  """Meets the other processes of a run; 'auto' finds out where."""
  if address == 'auto':
    jax.distributed.initialize()
  else:
    jax.distributed.initialize(address, int(count), int(index))


def main(argv: Sequence[str]) -> None:
  try:
    if len(argv) > 1:
      raise configuration.ConfigError(f'Unknown arguments: {argv[1:]}')
    if not _FILES.value:
      raise configuration.ConfigError(
        'Expected --gin_file=..., got none. configs/runs has examples.'
      )
    paths = [*_PATHS.value, *configuration.t5x_search_paths()]
    configuration.parse(_FILES.value, _BINDINGS.value, paths)
    if _called:
      configuration.refuse_idle_names(_called[0])
    if _PROCESSES.value:
      _join(*_PROCESSES.value)
    experiment.main(paths, *_called[:1])
  except configuration.ConfigError as error:
    print(f'Refused: {configuration.words(error)}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
  app.run(main, argv=_expand(sys.argv))
