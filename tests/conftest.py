# SPDX-License-Identifier: Apache-2.0
"""Tests of optional packages are collected only where these are installed."""

import importlib.util

# Packages -> the files whose tests need them.
OPTIONAL = {
  ('nbclient', 'ipykernel', 'pandas'): ['notebooks_test.py'],
  ('torch', 'transformers'): ['parity_test.py'],
  ('seqio',): ['seqio_tasks_test.py'],
  ('t5x',): ['t5x_*_test.py'],
}


def _missing(packages):
  return [p for p in packages if importlib.util.find_spec(p) is None]


collect_ignore_glob = [
  name
  for packages, names in OPTIONAL.items()
  if _missing(packages)
  for name in names
]


def pytest_terminal_summary(terminalreporter):
  for packages, names in OPTIONAL.items():
    if _missing(packages):
      terminalreporter.write_line(
        f'not run: {", ".join(names)} (needs {", ".join(_missing(packages))})'
      )
