"""The notebook of docs: python -m tests.notebook runs first_steps.py and writes first_steps.ipynb with its output."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tests import ROOT

SOURCE = ROOT / "docs" / "notebooks" / "first_steps.py"
SHOWN = SOURCE.with_suffix(".ipynb")


def execute(timeout_s: int = 300) -> Any:
    """The notebook after a run in an empty folder. What it prints as errors, such as progress, is left out."""
    import jupytext
    from nbclient import NotebookClient

    book = jupytext.read(SOURCE)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(book, timeout=timeout_s, resources={"metadata": {"path": folder}}).execute()
    for number, cell in enumerate(book.cells):
        cell["id"] = f"cell-{number}"  # nbformat draws one at random
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    book.metadata.pop("language_info", None)
    return book


if __name__ == "__main__":
    import nbformat

    nbformat.write(execute(), SHOWN)
