# SPDX-License-Identifier: Apache-2.0
"""Files of arrays that may lie in a bucket, such as gs://."""

import os
import tempfile

from etils import epath
import safetensors

Path = str | os.PathLike[str]


def absolute(path: Path) -> epath.Path:
  """What Orbax and TensorStore want; epath would take gs:// for a folder."""
  path = epath.Path(path).expanduser()
  return path if '://' in os.fspath(path) else path.resolve()


def open_safetensors(path: epath.Path):
  """Maps a file; one that is not local is copied first.

  Raises:
    ValueError: it is damaged or another kind of file.
  """
  with tempfile.TemporaryDirectory() as scratch:
    try:
      if '://' in os.fspath(path):
        path = path.copy(epath.Path(scratch) / path.name)
      return safetensors.safe_open(os.fspath(path), framework='numpy')
    except safetensors.SafetensorError as error:
      raise ValueError(
        f'{path} is cut short or no safetensors file ({error}). Copy it again.'
      ) from error
