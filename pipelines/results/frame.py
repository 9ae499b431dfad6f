"""A store as pandas frames: cells, records and paired differences, read from finished files alone.

    >>> from pipelines.results import load
    >>> found = load("outputs")
    >>> found.cells[["method", "budget", "score"]]

Each frame is made when it is first asked for. docs/results.md has recipes.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moend.errors import UserError, unknown
from pipelines.results.kept import shares
from pipelines.results.sweep import Row, compared, records, rows
from pipelines.store.cells import Store

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = (
    "score", "score_low", "score_high", "n", "n_records", "answer_nll", "token_accuracy", "eq1_bytes",
    "resident_bytes", "resident_bytes_end", "resident_bytes_peak", "full_bytes", "compression", "extraction_rate",
    "truncated", "prefill_seconds", "decode_seconds", "tokens_per_second", "fused", "metric", "unit",
    "higher_is_better", "commit", "finished",
)  # fmt: skip


class Results:
    """Frames of a store, or of one of its sweeps.

    cells: a line per cell, by key. State is `done` or why there is no score; numbers of such a cell are missing.
    records: a line per example and draw of every complete cell, with the cell's model, method, budget and benchmark.
    differences: a line per pair of complete cells that share a group, p adjusted over all pairs of their sweep.
    """

    def __init__(self, store: Store, sweeps: list[str]):
        self._store, self._sweeps = store, sweeps

    @cached_property
    def _rows(self) -> dict[str, list[Row]]:
        return {name: rows(self._store, self._store.read_manifest(name)) for name in self._sweeps}

    @cached_property
    def _distinct(self) -> list[Row]:
        """Each cell once: complete where any sweep says so."""
        found: dict[str, Row] = {}
        for row in (r for mine in self._rows.values() for r in mine):
            if row.key not in found or found[row.key].result is None:
                found[row.key] = row
        return list(found.values())

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Index `key`; sweeps lists the sweeps that hold a cell, settings is what the method's name stands for."""
        import pandas as pd

        sweeps: dict[str, list[str]] = {}
        for name, mine in self._rows.items():
            for row in mine:
                sweeps.setdefault(row.key, []).append(name)
        lines = []
        for row in self._distinct:
            r = row.result or {}
            line = _named(row) | {"state": row.state, "sweeps": sweeps[row.key]}
            line |= {"protocol": row.payload["budget_protocol"], "seed": row.payload["seed"], "variant": row.variant}
            line |= {name: r.get(name) for name in NUMBERS}
            lines.append(line | {"mixed": "; ".join(r.get("mixed") or ()), "settings": row.payload["method"]})
        return pd.DataFrame(lines).set_index("key") if lines else pd.DataFrame()

    @cached_property
    def records(self) -> pd.DataFrame:
        """One value a column: what a record holds per layer stays in its file. gold is the list of accepted answers."""
        import pandas as pd

        lines = []
        for row in self._distinct:
            named = _named(row)
            for record in records(self._store, row) if row.result is not None else ():
                told = {k: v for k, v in record.items() if not isinstance(v, list | dict) or k == "gold"}
                lines.append(named | told)
        return pd.DataFrame(lines)

    def kept(self, key: str) -> pd.DataFrame:
        """What a complete cell kept of each prompt: a line per record that tells it (`engine.kept`).

        Columns task, id, question, tokens, by and shares, an array as `pipelines.results.kept.shares` describes it.
        """
        import pandas as pd

        lines = []
        for r in self._of(key):
            if (told := r.get("kept")) is not None:
                named = {"task": r["task"], "id": r["id"], "question": r.get("question"), "tokens": told["tokens"]}
                lines.append({**named, "by": told.get("by", "layers"), "shares": shares(told)})
        return pd.DataFrame(lines)

    def growth(self, key: str) -> pd.DataFrame:
        """Bytes that a complete cell's caches held during long answers: a line per point.

        Columns task, id, draw, new_tokens (generated and fed so far) and resident_bytes; at most 64 points an answer.
        """
        import pandas as pd

        lines = []
        for r in self._of(key):
            told = r.get("bytes_over_tokens") or {"bytes": (), "every": 1}
            named = {"task": r["task"], "id": r["id"], "draw": r["draw"]}
            for i, held in enumerate(told["bytes"]):
                lines.append({**named, "new_tokens": 1 + i * told["every"], "resident_bytes": held})
        return pd.DataFrame(lines)

    def _of(self, key: str) -> list[dict[str, Any]]:
        """The records of a complete cell; UserError where there is none of that key."""
        found = {row.key: row for row in self._distinct if row.result is not None}
        if key not in found:
            raise unknown("complete cell", key, list(found))
        return records(self._store, found[key])

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Columns value, low, high, p, n and test of the score, p_holm, and nll, nll_low, nll_high."""
        import pandas as pd

        lines = []
        for name, mine in self._rows.items():
            for d in compared(self._store, mine):
                group = dict(zip(("model", "benchmark", "question", "variant", "budget"), d.group, strict=True))
                line: dict[str, Any] = {"sweep": name, **group, "method": d.method, "minus": d.other}
                line["ablation"] = d.name
                line |= asdict(d.score) | {"p_holm": d.p}
                if d.nll is not None:
                    line |= {"nll": d.nll.value, "nll_low": d.nll.low, "nll_high": d.nll.high}
                lines.append(line)
        return pd.DataFrame(lines)


def _named(row: Row) -> dict[str, Any]:
    """What names a cell. budget: as it is written (0.1r, 512t, ...), `full` for the full cache."""
    asked = row.payload["question_visible"]
    return {
        "key": row.key,
        "model": row.info["model"],
        "benchmark": row.info["benchmark"],
        "question_visible": asked,
        "method": row.method,
        "budget": row.payload["budget"] or "full",
    }


def load(store: str | Path = "outputs", sweep: str | None = None) -> Results:
    """The frames of all sweeps of a store, or of one (its name, or `latest`).

    UserError where there is no such folder, no sweep in it, or no pandas.
    """
    try:
        import pandas  # noqa: F401
    except ModuleNotFoundError:
        raise UserError("frames need pandas: pip install 'moend[experiments]'") from None
    root = Path(store).expanduser().absolute()
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give the store that sweeps were run into (paths.store)")
    found = Store(root)
    names = found.sweep_names() if sweep is None else [found.read_manifest(sweep)["name"]]
    if not names:
        raise UserError(f"no sweep was run into {root} yet")
    return Results(found, names)
