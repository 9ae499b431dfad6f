"""W&B as a view of the files: published afterwards, in a process of its own with a time limit, which may fail freely.

The run's id is the cell's key and its group the sweep, so publishing again replaces and never doubles. Offline by
default. Everything the tracker writes lies under <store>/wandb.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.schema import TrackingConfig
from pipelines.store import Store, read_json


def publish(store: Store, sweep: str, config: TrackingConfig, keys: Sequence[str]) -> bool:
    """Publish finished cells. A tracker that fails or hangs costs one warning. True where all went well."""
    if config.mode == "none" or not keys:
        return True
    from rich.console import Console

    folder = store.root / "wandb"
    job = {"mode": config.mode, "project": config.project, "store": str(store.root), "sweep": sweep, "keys": list(keys)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "publish.log").open("a") as log:
            done = subprocess.run(
                [sys.executable, "-m", "pipelines.tracking", json.dumps(job)],
                env=environment(folder, config.mode),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=config.timeout_s,
                check=False,
            )
        problem = "" if done.returncode == 0 else f"ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"took longer than {config.timeout_s:g} s"
    except OSError as e:
        problem = str(e)
    if problem:
        Console(stderr=True).print(
            f"warning: the tracker {problem}; results are not touched by that (log: {folder / 'publish.log'})",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    return not problem


def environment(folder: Path, mode: str) -> dict[str, str]:
    """The tracker's environment: all of its paths in `folder`, no run id or offline switch inherited from a shell."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith("WANDB_") or k in ("WANDB_API_KEY", "WANDB_BASE_URL")
    }
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(p for p in (root, kept.get("PYTHONPATH", "")) if p)
    return {
        **kept,
        "PYTHONPATH": path,
        "WANDB_MODE": mode,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(folder),
        "WANDB_DATA_DIR": str(folder / "data"),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_CONFIG_DIR": str(folder / "config"),
    }


def _write(job: dict[str, Any]) -> None:
    """In the child process: one W&B run per cell, written from its files."""
    import shutil

    import wandb

    store = Store(Path(job["store"]))
    root = store.root / "wandb"
    if not os.access(root, os.W_OK):  # wandb would move to the temporary folder with a warning
        raise PermissionError(f"{root} is not writable")
    for key in job["keys"]:
        folder = store.cell(key).folder
        described, result = read_json(folder / "payload.json"), read_json(folder / "result.json")
        for old in (root / "wandb").glob(f"*run-*-{key}"):
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
        names = {k: described["info"][k] for k in ("model", "method", "benchmark")}
        run = wandb.init(
            project=job["project"],
            id=key,
            name=described["info"]["label"],
            group=job["sweep"],
            job_type="eval",
            config={**described["payload"], "names": names},
            reinit="finish_previous",
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
                init_timeout=30,
            ),
        )
        run.summary.update({k: v for k, v in result.items() if isinstance(v, int | float | str | bool)})
        run.finish()


if __name__ == "__main__":
    _write(json.loads(sys.argv[1]))
