"""The notebook of docs runs, and both of its files are the same notebook."""

from __future__ import annotations

import pytest

from tests import notebook

jupytext = pytest.importorskip("jupytext")


def test_both_files_hold_the_same_cells() -> None:
    """After an edit: python -m tests.notebook."""
    source, shown = jupytext.read(notebook.SOURCE), jupytext.read(notebook.SHOWN)
    assert [(c.cell_type, c.source) for c in source.cells] == [(c.cell_type, c.source) for c in shown.cells]


@pytest.mark.slow
@pytest.mark.process
def test_the_notebook_runs_and_shows_what_it_says() -> None:
    cells = notebook.execute().cells
    shown = [out for c in cells if c.cell_type == "code" for out in c.outputs]
    printed = "".join(out.get("text", "") for out in shown)
    kinds = {kind for out in shown for kind in out.get("data", {})}
    assert "image/png" in kinds and "text/html" in kinds  # what was kept, and the tables
    assert "SnapKV" in printed and "from the file:" in printed
    file, solved = (line.partition(": ")[2].strip() for line in printed.splitlines()[-2:])
    assert file == solved
