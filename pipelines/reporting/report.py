"""python -m pipelines.report sweep=<name|latest>: a sweep as one page, its tables and figures, and on the screen."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moend.errors import unknown
from pipelines.cli.args import parse, program, store_default, store_path
from pipelines.cli.terminal import console, fit, say
from pipelines.planning.identity import key
from pipelines.reporting import latex, pareto, tables
from pipelines.reporting.figures import Picture
from pipelines.reporting.tables import DELTA_TITLES, TITLES, ablations, notes
from pipelines.results.deltas import Delta
from pipelines.results.rescore import rescore_sweep
from pipelines.results.sweep import GONE, Row, Sweep, compared, rows
from pipelines.store import provenance
from pipelines.store.cells import CorruptRecords, Store
from pipelines.store.files import write_atomic

FIGURES = ("shown", "all", "none")
SHOWN = 1  # figures of each kind on the page: a sweep of 500 cells has dozens

# What a narrow terminal leaves out, first to last: table.csv and the page have all of it.
SPARE = ("tokens/s", "eq. 1", "full", "peak", "answer NLL", "compression", "question")

__all__ = ["Row", "compared", "main", "notes", "rows", "show", "show_deltas", "write"]

USAGE = """A sweep as one page with tables and figures, from its files alone.

  python -m pipelines.report [sweep=latest] [paths.store=outputs] [rescore=false] [figures=shown]

  sweep        name of a sweep that was run, or latest
  paths.store  where it was run
  rescore      true: compute the scores again from the records, without model or network
  figures      shown: those on the page, the first of each kind, as PNG; all: every one, as PNG and PDF; none

Beside the page stands answers.html: the answers that compression changes, with their texts.

Writes to <store>/reports/<sweep>/: index.html, one file that needs nothing else (published numbers beside ours, where a
paper has them); table.csv, tasks.csv, deltas.csv (paired differences of all methods), published.csv, table.md,
pareto.md (the frontier of score and bytes, to paste), tables.tex; the figures. A sweep that is not complete gives a
partial report that says so.
Exit codes: 0 complete, 2 a mistake in the command, 3 some cells are incomplete."""


def show(store: Store, name: str, to: Console) -> list[Row]:
    """Print the table."""
    manifest = store.read_manifest(name)
    found = rows(store, manifest)
    models = sorted({r.info["model"] for r in found})
    for model in models:
        title = f"{manifest['name']}: {model}"
        mine = [r for r in found if r.info["model"] == model]
        lines = [tables.cells(r) for r in mine]
        whole = [x for r, x in zip(mine, lines, strict=True) if r.result is not None]  # why others lack one may wrap
        kept = fit(TITLES, whole, to.width, SPARE)
        table = Table(box=None, title=title, title_justify="left", header_style="bold")
        for i in kept:
            table.add_column(TITLES[i], justify="right" if i > 4 else "left", no_wrap=i != 4)
        last = None
        for cells in lines:
            if last not in (None, cells[:2]):
                table.add_row()
            last = cells[:2]
            table.add_row(*(cells[i] for i in kept))
        to.print(table)
        if gone := [t for i, t in enumerate(TITLES) if i not in kept]:
            say(to, f"the terminal has no room for: {', '.join(gone)}")
    for line in notes(found):
        say(to, line)
    if did := tables.diagnosed(Sweep(store, manifest, found, ())):
        table = Table(
            *tables.DIAGNOSED_TITLES, box=None, title="what methods did", title_justify="left", header_style="bold"
        )
        for i in range(4, 10):
            table.columns[i].justify = "right"
        for cells in did:
            table.add_row(*cells)
        to.print(table)
    return found


def show_deltas(found: Sequence[Delta], to: Console) -> None:
    """Print the ablations, where the sweep has any."""
    lines = ablations(found)
    if not lines:
        return
    kept = fit(DELTA_TITLES, lines, to.width, ("answer NLL", "seen at 80 %", "question", "benchmark"))
    table = Table(box=None, title="paired differences", title_justify="left", header_style="bold")
    for i in kept:
        table.add_column(DELTA_TITLES[i], justify="right" if i > 3 else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(line[i] for i in kept))
    to.print(table)


def write(
    store: Store, name: str, differences: Sequence[Delta], *, again: bool = True, drawn: str = "shown"
) -> list[Path]:
    """Write the page, the tables and the figures; returns their paths, the page first.

    again: False leaves the files of a report alone that was made of the very same results by the same code.
    drawn: `shown` draws the figures that the page shows, the first of each kind, as PNG; `all` draws every one, as PNG
        and PDF; `none` draws none.
    """
    manifest = store.read_manifest(name)
    sweep = Sweep(store, manifest, rows(store, manifest), differences)
    folder, made_of = store.report(sweep.name), _fingerprint(sweep)
    stamp = folder / "made_of.txt"
    if not again and stamp.exists() and stamp.read_text(encoding="utf-8") == made_of:
        return [folder / "index.html"]
    from pipelines.reporting import answers, figures, page
    from pipelines.reporting.match import comparisons

    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    published = comparisons(sweep)
    files = {
        "table.csv": tables.cells_csv(sweep.rows),
        "tasks.csv": tables.tasks_csv(sweep.rows),
        "deltas.csv": tables.deltas_csv(differences),
        **({"published.csv": tables.published_csv(published)} if published else {}),
        "table.md": tables.markdown(sweep, published),
        **({"pareto.md": pareto.markdown(sweep.fronts)} if sweep.fronts else {}),
        "tables.tex": latex.latex(sweep, published),
    }
    for file, text in files.items():
        write_atomic(folder / file, text)
    pictures, more = figures.first(sweep, {"shown": SHOWN, "none": 0}.get(drawn))
    made_of_them: list[tuple[Picture, Path]] = []
    on_page: list[tuple[Picture, Path]] = []
    for old in [*folder.glob("*.png"), *folder.glob("*.pdf")]:
        old.unlink()  # of an earlier report: other cells may have been complete then
    with figures.only_png() if drawn == "shown" else contextlib.nullcontext():
        for picture in pictures:
            path = folder / f"{picture.name}.png"
            if picture.draw(path):
                shown = sum(p.kind == picture.kind for p, _ in made_of_them)
                made_of_them.append((picture, path))
                on_page += [(picture, path)] if shown < SHOWN else []
    made = time.strftime("%Y-%m-%d %H:%M:%S %z")
    write_atomic(folder / "index.html", page.page(sweep, published, on_page, more, files, made))
    (folder / "answers.html").unlink(missing_ok=True)
    pages = ["index.html"]
    if (changed := answers.page(sweep, made)) is not None:
        write_atomic(folder / "answers.html", changed)
        pages.append("answers.html")
    write_atomic(stamp, made_of)
    return [*(folder / p for p in pages), *(folder / file for file in files), *(path for _, path in made_of_them)]


def _fingerprint(sweep: Sweep) -> str:
    """What a report is a function of: results, states and code."""
    cells = [[row.key, row.state, row.result] for row in sweep.rows]
    return key([sweep.name, provenance.commit(), provenance.versions(), cells])


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    try:
        values = parse(args, {"sweep": "latest", "rescore": "false", "figures": "shown", **store_default()})
        if values["figures"] not in FIGURES:
            raise unknown("choice of figures", values["figures"], FIGURES)
        store, to = Store(store_path(values)), console()
        manifest = store.read_manifest(values["sweep"])
        if values["rescore"] == "true":
            again = rescore_sweep(store, manifest)
            say(to, f"scores computed again from the records: {len(again)} of {len(manifest['cells'])} results changed")
            for cell in again:
                say(to, f"  {cell}")
        found = show(store, manifest["name"], to)
        differences = compared(store, found)
        show_deltas(differences, to)
        for path in write(store, manifest["name"], differences, drawn=values["figures"]):
            say(to, str(path))
        missing = [r for r in found if r.state.startswith(GONE)]
        if missing:
            say(to, f"{len(missing)} of {len(found)} cells are incomplete; to go on: {manifest['command']}")
        return 3 if missing else 0
    except CorruptRecords as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
