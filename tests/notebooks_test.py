# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom, and are stored without outputs."""

import pathlib

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / 'notebooks'
NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
  notebook = nbformat.read(path, as_version=4)
  cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert not any(cell.outputs or cell.execution_count for cell in cells)
  nbclient.NotebookClient(
    notebook, timeout=300, resources={'metadata': {'path': str(FOLDER)}}
  ).execute()
  shown = [
    kind
    for cell in cells
    for output in cell.outputs
    for kind in output.get('data', {})
  ]
  assert 'image/png' in shown
