"""python -m pipelines.dashboard paper=moend: a W&B dashboard and report per paper, built by code from what is logged.

A panel names what `pipelines.tracking.runs` writes: fields of result.json, `record/*`, `figures/*`, `tables/*`. Runs
belong to a paper and a table by their tags, so that a sweep with an axis replaced is among them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moend import paths
from moend.errors import UserError, unknown
from pipelines.cli import terminal
from pipelines.cli.args import parse, program, store_default, store_path
from pipelines.cli.terminal import say
from pipelines.store.cells import Store
from pipelines.store.files import read_json, write_json
from pipelines.tracking import upload as sync
from pipelines.tracking import wandb as tracking

USAGE = """A W&B dashboard and a report per paper.

  python -m pipelines.dashboard [paper=all] [push=false] [project=moend] [entity=] [paths.store=outputs]

  paper        moend, ripple, moezip, or all
  push         true: make them at W&B, or replace those made before; needs a key and the network
  project      of W&B, where pipelines.sync uploaded the runs
  entity       user or team of W&B; empty: your default
  paths.store  where the specifications are written: wandb/dashboards/<paper>.{workspace,report}.json

Without push, only the files are written, offline. Needs the package wandb-workspaces: pip install wandb-workspaces.
Exit codes: 0 done, 2 a mistake in the command, or no package, key or network."""


@dataclass(frozen=True)
class Paper:
    """A paper: the sweeps that evaluate its tables, and which groups of panels its dashboard opens with."""

    name: str
    title: str
    text: str
    tables: tuple[str, ...]
    opened: tuple[str, ...]


PAPERS = {
    p.name: p
    for p in (
        Paper(
            "moend",
            "MoE-nD",
            "Joint routing of kept tokens, key bits and value bits per layer.",
            (
                *("moend_table2", "moend_table4", "moend_table6", "moend_overhead"),
                *("moend_attention", "moend_instruct", "moend_signal", "moend_long"),  # limits that the paper names
            ),
            ("Accuracy and memory", "Routing"),
        ),
        Paper(
            "ripple",
            "RippleKV",
            "Layer budgets that follow the model's response to a perturbed layer.",
            ("ripple_table2", "ripple_fig2", "ripple_table3", "ripple_table4", "ripple_table5"),
            ("Accuracy and memory", "Routing"),
        ),
        Paper(
            "moezip",
            "MoEZip",
            "Eviction guided by the routers of a mixture of experts, beside KVZip.",
            ("moezip_table1",),
            ("Accuracy and memory", "Records"),
        ),
    )
}
# Of the same papers, but only measured, by pipelines.calibrate: no cells, hence no runs.
MEASURED = ("moend_fig2", "moend_klcheck", "ripple_table1")
GROUP = "config.method_name"


def _bars(*metrics: str) -> Callable[[Any], list[Any]]:
    return lambda wr: [
        wr.BarPlot(title=m.replace("_", " "), metrics=[m], groupby=GROUP, orientation="h", legend_template=LEGEND)
        for m in metrics
    ]


LEGEND = "${config:label}"
Panels = Callable[[Any], list[Any]]
SECTIONS: dict[str, Panels] = {
    "Accuracy and memory": lambda wr: [
        wr.ScatterPlot(
            title="score over resident bytes",
            x=wr.SummaryMetric("resident_bytes"),
            y=wr.SummaryMetric("score"),
            log_x=True,
            legend_template=LEGEND,
        ),
        *_bars("score", "score_low", "score_high", "answer_nll")(wr),
    ],
    "Tables with intervals": lambda wr: [
        wr.WeavePanelSummaryTable(table_name="tables/table"),
        wr.WeavePanelSummaryTable(table_name="tables/deltas"),
        wr.MediaBrowser(title="accuracy over memory", media_keys=["figures/accuracy_memory"]),
    ],
    "Routing": lambda wr: [
        wr.MediaBrowser(title="what every layer was given", media_keys=["figures/routing_map"], num_columns=2),
        wr.WeavePanelSummaryTable(table_name="layers"),
    ],
    "Retrieval": lambda wr: [
        wr.MediaBrowser(title="needle by length and depth", media_keys=["figures/niah_heatmap"], num_columns=3)
    ],
    "Bytes": _bars("compression", "eq1_bytes", "resident_bytes", "resident_bytes_peak", "full_bytes"),
    "Records": lambda wr: [
        wr.LinePlot(title="score of each record", x="Step", y=["record/score"], legend_template=LEGEND),
        wr.LinePlot(title="NLL of the gold answer", x="Step", y=["record/answer_nll"], legend_template=LEGEND),
        wr.WeavePanelSummaryTable(table_name="records"),
    ],
    "Speed (shared where fused is true)": _bars("tokens_per_second", "prefill_seconds", "decode_seconds", "fused"),
}
NO_CELLS = ("Tables with intervals",)  # from the run of a sweep, not from those of its cells


def _packages() -> tuple[Any, Any]:
    """Reports and workspaces of wandb-workspaces, quiet and without a look at the network."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "wandb_workspaces":
            raise
        raise UserError("wandb-workspaces is not installed: pip install wandb-workspaces") from None
    return wr, ws


def installed() -> bool:
    """Whether wandb-workspaces is there."""
    from importlib.util import find_spec

    return find_spec("wandb_workspaces") is not None


def workspace(paper: Paper, entity: str, project: str) -> Any:
    """A paper's dashboard: all of its runs, a section per question."""
    wr, ws = _packages()
    sections = [
        ws.Section(name=name, panels=panels(wr), is_open=name in paper.opened) for name, panels in SECTIONS.items()
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"{paper.title} (moend)",
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="Step", smoothing_type="none"),
        runset_settings=ws.RunsetSettings(filters=[ws.Tags().isin([f"paper:{paper.name}"])]),
        auto_generate_panels=False,
    )


def report(paper: Paper, entity: str, project: str) -> Any:
    """A paper's report: a chapter per table, with what it measures, its differences and its runs."""
    wr, ws = _packages()
    blocks = [wr.TableOfContents(), wr.MarkdownBlock(f"{paper.text} Scores carry 95 % intervals in the tables.")]
    for table in paper.tables:
        tag = ws.Tags().isin([f"table:{table}"])
        # Without entity and project: given both, the package asks the server whether they are there.
        cells = wr.Runset(name="cells", filters=[tag, ws.Metric("JobType") == "cell"])
        sweeps = wr.Runset(name="sweeps", filters=[tag, ws.Metric("JobType") == "report"])
        shown = [p for name, panels in SECTIONS.items() if name not in NO_CELLS for p in panels(wr)]
        whole = [p for name in NO_CELLS for p in SECTIONS[name](wr)]
        blocks += [wr.H1(table), wr.MarkdownBlock(description(table))]
        blocks += [wr.PanelGrid(runsets=[sweeps], panels=whole), wr.PanelGrid(runsets=[cells], panels=shown)]
    return wr.Report(
        entity=entity, project=project, title=f"{paper.title} (moend)", description=paper.text, blocks=blocks
    )


def description(table: str) -> str:
    """What a sweep's file says of itself, and the command that runs it."""
    lines = (paths.folder("sweeps", "sweep") / f"{table}.yaml").read_text(encoding="utf-8").splitlines()[1:]
    said = [x.removeprefix("#").strip() for x in lines[: next(i for i, x in enumerate(lines) if not x.startswith("#"))]]
    return " ".join(said) + f"\n\n    python -m pipelines.run +sweep={table}\n"


def specification(view: Any) -> dict[str, Any]:
    """What would be sent, as JSON. Identifiers of panels are drawn anew each time and left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if k not in ("id", "__id__")}
        return [plain(x) for x in value] if isinstance(value, list) else value

    # Private, and the only way to look before sending: a test holds it to the version in constraints.txt.
    sent: dict[str, Any] = plain(json.loads(view._to_model().model_dump_json(by_alias=True, exclude_none=True)))
    return sent


BUILD = {"report": report, "workspace": workspace}  # in this order: saving a report makes a project that is not there


def push(paper: Paper, kind: str, target: sync.Target, ledger: Path) -> str:
    """Make a view at the server, or replace the one that an earlier push made; returns its address."""
    made = read_json(ledger) if ledger.exists() else {}
    at = f"{target} {paper.name} {kind}"
    view = BUILD[kind](paper, target.entity, target.project)
    known = made.get(at)
    if kind == "report":
        view.id = known["id"] if known else ""
    elif known:
        view._internal_id, view._internal_name = known["id"], known["name"]
    view.save()
    ids = {"id": view.id} if kind == "report" else {"id": view._internal_id, "name": view._internal_name}
    write_json(ledger, {**made, at: ids})
    return str(view.url)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    defaults = {"paper": "all", "push": "false", "project": sync.PROJECT, "entity": "", **store_default()}
    values = parse(args, defaults)
    if values["paper"] not in (*PAPERS, "all"):
        raise unknown("paper", values["paper"], [*PAPERS, "all"])
    papers = list(PAPERS.values()) if values["paper"] == "all" else [PAPERS[values["paper"]]]
    to, folder = terminal.console(), Store(store_path(values)).root / "wandb"
    (folder / "dashboards").mkdir(parents=True, exist_ok=True)
    for paper in papers:
        for kind, build in BUILD.items():
            path = folder / "dashboards" / f"{paper.name}.{kind}.json"
            write_json(path, specification(build(paper, values["entity"] or "entity", values["project"])))
            say(to, str(path))
    if values["push"] == "true":
        target = sync.Target.of(values["project"], values["entity"] or None)
        sync.refuse_unreachable(target)
        with _only(tracking.environment(folder, "online", key=True)):
            try:
                target = sync.Target(target.server, target.entity or default_entity(), target.project)
                for paper in papers:
                    for kind in BUILD:
                        say(to, push(paper, kind, target, folder / "dashboards" / "pushed.json"))
            except Exception as e:  # a dozen types of the client's; whatever it is, the server did not take it
                raise UserError(f"{target} did not take it: {' '.join(str(e).split())[:300]}") from None
    return 0


@contextlib.contextmanager
def _only(environment: dict[str, str]) -> Iterator[None]:
    """This process with another environment: the client reads paths and defaults from it, whatever it is told."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def default_entity() -> str:
    """Whose the key is."""
    import wandb

    found = wandb.Api().default_entity
    if not found:
        raise UserError("the key has no default entity: give entity=")
    return str(found)


if __name__ == "__main__":
    sys.exit(main())
