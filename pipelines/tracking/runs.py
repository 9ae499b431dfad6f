"""python -m pipelines.tracking.runs: writes the W&B runs of finished cells and reports. The tracker starts it.

A run is made from files alone and records nothing by itself. Items arrive on standard input, one a line; what fails is
said on standard output, with a traceback in the log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from moend.errors import UserError
from pipelines.planning.schema import TrackingConfig
from pipelines.store.cells import Store, record_key
from pipelines.store.files import read_json, write_json
from pipelines.store.lease import Busy, Lease
from pipelines.tracking.items import TAG, Item, Source, published, report_files, source

LIMIT = 128  # the longest id and artifact name
CRASHED = 3  # an exit code
STEPS = (
    "score",
    "answer_nll",
    "token_accuracy",
    "prompt_tokens",
    "new_tokens",
    "resident_bytes",
    "resident_bytes_peak",
)


def write(store: Store, made: Source) -> None:
    """Write one run, unless it is there already. Busy where another process is writing the same one."""
    have = published(store, made.item)
    if have and have["digest"] == made.digest:
        return
    root, name = store.root / "wandb", made.item.id
    lease = Lease(root / "published" / name)
    try:
        (root / "published" / f"{name}.json").unlink(missing_ok=True)
        for old in [*(root / "wandb").glob(f"*run-*-{name}"), root / "data" / name]:
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
        os.environ["WANDB_DATA_DIR"] = str(root / "data" / name)  # staged per run, so that a run takes its own along
        label, at = (_cell if made.item.kind == "cell" else _report)(store, made)
        about: dict[str, Any] = {
            "id": name,
            "kind": made.item.kind,
            "name": made.item.name,
            "label": label,
            "digest": made.digest,
        }
        about |= {
            "project": made.project,
            "entity": made.entity,
            "group": made.group,
            "folder": at.name,
            "root": str(store.root),
        }
        write_json(root / "published" / f"{name}.json", about)
    finally:
        lease.release()


@contextlib.contextmanager
def _run(made: Source, name: str, job: str, config: dict[str, Any], tags: Sequence[str]) -> Iterator[Any]:
    """A wandb run that records nothing by itself: no host, command, environment, code, packages or console."""
    import wandb

    run = wandb.init(
        project=made.project,
        entity=made.entity,
        id=made.item.id,
        name=name,
        group=made.group[:LIMIT],
        job_type=job,
        tags=[*made.tags, *(t[:TAG] for t in tags)],
        config=config,
        reinit="finish_previous",
        settings=wandb.Settings(
            console="off",
            silent=True,
            symlink=False,
            host="-",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        ),
    )
    try:
        yield run
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _cell(store: Store, made: Source) -> tuple[str, Path]:
    """The run of a cell: config, a step per record, tables of records and layers, figures, artifacts, the result."""
    import wandb

    cell = store.cell(made.item.name)
    described, result = read_json(cell.folder / "payload.json"), read_json(cell.folder / "result.json")
    info, payload = described["info"], described["payload"]
    records = sorted(cell.records(), key=record_key)  # the same order however the work was shared and resumed
    names = {f"{k}_name": info[k] for k in ("model", "method", "benchmark")}
    config = {
        **payload,
        **names,
        "label": info["label"],
        "sweeps": [t.partition(":")[2] for t in made.tags if t.startswith("sweep:")],
    }
    tags = [f"{k}:{info[k]}" for k in ("model", "method", "benchmark")]
    plan = cell.folder / "plan.json"
    with _run(made, info["label"], "cell", config, tags) as run:
        run.define_metric("record/*", summary="none")
        for step, record in enumerate(records):
            run.log({f"record/{k}": v for k in STEPS if (v := record.get(k)) is not None}, step=step)
        columns, rows = record_table(records)
        wandb.Table.MAX_ROWS = max(wandb.Table.MAX_ROWS, len(rows))
        shown: dict[str, Any] = {"records": wandb.Table(columns=columns, data=rows)}
        columns, rows = layer_table(result)
        shown["layers"] = wandb.Table(columns=columns, data=rows)
        pictures = store.root / "wandb" / "data" / made.item.id / "figures"
        for path in _pictures(info["label"], result, read_json(plan) if plan.exists() else None, pictures):
            shown[f"figures/{path.stem}"] = wandb.Image(str(path))
        run.log(shown, step=len(records))
        run.summary.update(result)
        _artifact(run, "records", f"records-{cell.key}", sorted((cell.folder / "records").glob("*-of-*.jsonl")))
        if plan.exists():
            _artifact(run, "plan", f"plan-{cell.key}", [plan])
        for kind, key in payload["calibrations"].items():
            files = [p for p in sorted(store.calibration(key).glob("*")) if p.suffix in (".safetensors", ".json")]
            _artifact(run, "calibration", f"calibration-{kind}-{key}", files)
        at = Path(run.dir).parent
    return str(info["label"]), at


def record_table(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows, one row per record: the fields that are single values; lists per layer are in the artifact."""
    fields = dict.fromkeys(k for r in records for k in r)
    simple = [k for k in fields if all(isinstance(r.get(k), str | int | float | None) for r in records)]
    columns = [*simple, *(["gold"] if "gold" in fields and "gold" not in simple else [])]
    return columns, [
        [r.get(k) if k in simple else json.dumps(r.get(k), ensure_ascii=False) for k in columns] for r in records
    ]


def layer_table(result: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """What every layer was given and held: mean entries and kept share per head, and bits."""
    entries = result["entries_per_head"]
    columns = {**{k: entries[k] for k in ("requested", "held", "effective_keep")}}
    columns |= {"k_bits": result["k_bits"], "v_bits": result["v_bits"]}
    rows = [[i, *(_single(x) for x in line)] for i, line in enumerate(zip(*columns.values(), strict=True))]
    return ["layer", *columns], rows


def _single(value: Any) -> Any:
    return sum(value) / len(value) if isinstance(value, list) and value else value


def _pictures(label: str, result: dict[str, Any], plan: dict[str, Any] | None, folder: Path) -> list[Path]:
    from pipelines.reporting.figures import niah_heatmap, routing_map

    made = []
    if (grid := result.get("grid")) and niah_heatmap.draw([(label, grid)], folder / "niah_heatmap.png"):
        made.append(folder / "niah_heatmap.png")
    if plan and plan["layers"] and routing_map.draw([(label, plan)], folder / "routing_map.png"):
        made.append(folder / "routing_map.png")
    return made


def _report(store: Store, made: Source) -> tuple[str, Path]:
    """The run of a sweep: its tables (also as an artifact) and figures."""
    import wandb

    files = report_files(store, made.item.name)
    label = f"report of {made.item.name}"
    tables = [f for f in files if f.suffix == ".csv"]
    with _run(made, label, "report", {"sweep": made.item.name, "label": label}, []) as run:
        shown: dict[str, Any] = {f"figures/{f.stem}": wandb.Image(str(f)) for f in files if f.suffix == ".png"}
        for path in tables:
            columns, rows = csv_table(path)
            shown[f"tables/{path.stem}"] = wandb.Table(columns=columns, data=rows)
        run.log(shown, step=0)
        data = store.root / "wandb" / "data" / made.item.id / "tables"
        data.mkdir(parents=True)
        copies = [Path(shutil.copy(f, data / f.name)) for f in tables]  # the next report writes its own over them
        _artifact(run, "report", f"tables-{made.item.id}"[:LIMIT], copies)
        at = Path(run.dir).parent
    return label, at


def csv_table(path: Path) -> tuple[list[str], list[list[Any]]]:
    """A CSV file with columns of numbers as numbers; what is empty is None."""
    import csv

    with path.open(newline="", encoding="utf-8") as file:
        columns, *rows = csv.reader(file)
    numeric = [all(_is_number(r[i]) for r in rows if r[i]) and any(r[i] for r in rows) for i in range(len(columns))]
    return columns, [
        [None if x == "" else float(x) if number else x for x, number in zip(row, numeric, strict=True)] for row in rows
    ]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _artifact(run: Any, kind: str, name: str, files: Sequence[Path]) -> None:
    """Files of the store, by reference: they never change once a cell is done, and calibrations can be large."""
    import wandb

    if files:
        artifact = wandb.Artifact(name, type=kind)
        for path in files:
            artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
        run.log_artifact(artifact)


def main() -> int:
    """Publish the items whose names arrive on standard input until it ends. Says on standard output what failed."""
    job = json.loads(sys.argv[1])
    store, config = Store(Path(job["store"])), TrackingConfig.model_validate(job["config"])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what wandb prints belongs into the log
    with contextlib.suppress(OSError):
        os.nice(10)  # the evaluation comes first
    online = _uploader(store, config) if config.mode == "online" else None
    tried: set[str] = set()
    for line in _lines(sys.stdin.buffer):
        if line in tried:
            continue
        tried.add(line)
        kind, _, name = line.partition(" ")
        item = Item("cell" if kind == "cell" else "report", name)
        # From a thread of its own that no lock and no library can hold up: a hang ends the process, with its stack.
        faulthandler.dump_traceback_later(config.timeout_s, exit=True)
        try:
            if (made := source(store, item, job["sweep"], config.project, config.entity)) is not None:
                write(store, made)
                if online is not None:
                    online(item)
        except Busy:
            pass  # somebody else is writing it
        except Exception as e:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), traceback.format_exc(), file=sys.stderr, flush=True)
            out.write(f"{item.id}: {' '.join(str(e).split())[:500] or type(e).__name__}\n")
            out.flush()
        finally:
            faulthandler.cancel_dump_traceback_later()
    return 0


def _uploader(store: Store, config: TrackingConfig) -> Callable[[Item], None]:
    """Uploads one item; where there is no key or network, that is found out once and not for every item."""
    from pipelines.tracking import upload as sync

    target = sync.Target.of(config.project, config.entity)
    refused: list[Exception] = []
    asked = False

    def upload(item: Item) -> None:
        nonlocal asked
        if not asked:
            asked = True
            try:
                sync.refuse_unreachable(target)
            except UserError as e:
                refused.append(e)
        if refused:
            raise refused[0]
        sync.upload_one(store, item, target, config.timeout_s)

    return upload


def _lines(stream: IO[bytes]) -> Iterator[str]:
    while line := stream.readline():
        yield line.decode().rstrip("\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)
