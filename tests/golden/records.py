"""Golden records: what every method generates, holds and keeps on the fixture models, to the token and to the byte.

A record is made of one case: a model, a prompt, a method (as its file says, or with fields changed), a budget, a
protocol, and whether the question is seen before compression. A large change of the library proves what it changed by
the records that it moves.

    python -m tests.golden.records           prints what changed and writes tests/golden/records.json
    python -m tests.golden.records --check   prints what changed, writes nothing, exits with 1 if anything did

Prompts and calibrations are files beside this one (`tests.golden.inputs` makes them), so no change of the code that
makes prompts or calibrations moves a record. All that is asked of the library is asked in the section "The library".
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from safetensors.torch import load_file

# The library: its names stand in these imports and down to "The cases", and nowhere else.
from moend import decoding
from moend import engine as engine_module
from moend.benchmarks.base import Rendered, Sample
from moend.budget import Budget
from moend.calibration.artefact import Artefact
from moend.decoding import Job
from moend.engine import Engine
from moend.methods.bind import bind, reference_length
from moend.methods.spec import from_fields, with_part
from moend.models import load as models


def engine_version() -> int:
    """Return the version of the engine that makes the records."""
    return int(getattr(engine_module, "ENGINE_VERSION", 1))


def load(name: str) -> Any:
    """Load a fixture model in fp32 on the CPU; its cache holds 16-bit entries in 16 bit."""
    with tempfile.TemporaryDirectory() as cache:
        return models.load(models.spec(name, device="cpu", dtype="float32"), Path(cache))


def example(prompt: Prompt) -> Any:
    """Make a prompt the example that the engine reads."""
    sample = Sample("golden", prompt.name, "", "", "", ())
    return Rendered(sample, prompt.ids, prompt.context_tokens, prompt.new, gold_ids=prompt.gold_ids, context_start=1)


def bound(loaded: Any, case: Case, prompt: Prompt, tensors: Mapping[str, Any]) -> Any:
    """Fit a case's method to the model; raises what the library raises where it refuses or the budget is too small."""
    method, budget = from_fields(case.fields), Budget.parse(case.budget)
    new = max(prompt.new, len(prompt.gold_ids))
    made = bind(
        method,
        budget,
        case.protocol,
        loaded.arch,
        t_ref=reference_length(method, budget, len(prompt.ids) + new, new),
        artefacts={kind: Artefact(kind, {}, dict(held)) for kind, held in tensors.items()},
        store_dtype=loaded.store_dtype,
        at=case.at,
    )
    Engine(loaded).admit(made, question_visible=case.visible)
    cut = len(prompt.ids) - 1 if case.visible else prompt.context_tokens
    made.specs(cut, len(prompt.ids) + new - cut - 1)
    return made


def run(loaded: Any, prompt: Prompt, bounds: Sequence[Any], visible: bool) -> list[dict[str, Any]]:
    """Run fitted methods on one prompt from one prefill, greedily and past the end of the answer; return records."""
    engine, ends, finish = Engine(loaded), {}, decoding.finish
    if prompt.past_eos:
        engine.decoder.eos = frozenset()

    def finished(batch: Sequence[Any], cache: Any, slots: Sequence[int]) -> None:
        """Note what a sequence holds at its end, before the engine lets it go."""
        layers = [layer.parts for layer in cache.layers]  # all sequences at once: each look lays all of them out
        for s, slot in zip(batch, slots, strict=True):
            ends[id(s.out)] = [[p.tolist() for p in engine_module._head_positions(parts[slot])] for parts in layers]
        finish(batch, cache, slots)

    with mock.patch.object(decoding, "finish", finished):
        outs = engine.run(example(prompt), [Job(b) for b in bounds], question_visible=visible, seed=0, positions=True)
    return [
        record(
            tokens=out.token_ids,
            nll=out.answer_nll,
            resident=out.resident_bytes,
            end=out.resident_bytes_end,
            peak=out.resident_bytes_peak,
            k_bits=out.k_bits,
            v_bits=out.v_bits,
            kept=[[p.tolist() for p in heads] for heads in out.positions],
            kept_end=ends[id(out)],
        )
        for out in outs
    ]


# The cases

HERE = Path(__file__).resolve().parent
RECORDS, PROMPTS, CALIBRATIONS = HERE / "records.json", HERE / "prompts.json", HERE / "calibrations"
METHODS = HERE.parents[1] / "conf" / "method"
MODELS = ("recall_moe", "recall_moe_v2")
BUDGETS = ("25%", "10%", "48")
LONG, LONG_TOKENS = "50%", "96"  # more than sinks and recent tokens, so that scores decide
ROOMY, LONG_ROOMY = "80%", "250"  # for methods that keep every token
FAMILY = ("1d", "2d_uniform", "2d", "2d_hetero")
DECODING = ("H2O", "TOVA", "StreamingLLM", "Scissorhands", "RKV", "1d", "2d_uniform")
PAIRS = ((16, 16), (8, 8), (8, 4), (4, 4))
NLL = 2e-3  # kernels (`moend.kernels`) and CPUs add up in different orders
TIES = 0.01  # share of cases in which one layer may end with another entry, for the same reason: its scores are a tie
READABLE = 16  # tokens that stand in the file; the rest is hashed
Fields = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids, how many of them are compressed where the question is unseen, what is scored and generated.

    past_eos: the engine generates `new` tokens whatever they are.
    """

    name: str
    ids: tuple[int, ...]
    context_tokens: int
    gold_ids: tuple[int, ...]
    new: int
    past_eos: bool


@dataclass(frozen=True)
class Case:
    """One method at one budget on one prompt; `changes` are fields that differ from the method's file."""

    prompt: str
    method: str
    budget: str
    visible: bool = True
    protocol: str = "matched"
    changes: Fields = field(default_factory=dict)
    at: Any = "prompt"

    @property
    def fields(self) -> Fields:
        """Return the method's fields, changed."""
        own = method_file(self.method)
        parts = {k: with_part(own.get(k), v) for k, v in self.changes.items() if k in ("scorer", "allocator")}
        return own | self.changes | parts

    @property
    def group(self) -> str:
        """Return the method, its schedule and its bits: what changed cases are grouped by."""
        precision = self.fields["precision"]
        changes = {k: v for k, v in self.changes.items() if k != "precision"}
        said = " ".join([self.method, *(f"{k}={json.dumps(v)}" for k, v in sorted(changes.items()))])
        return f"{said} | {self.fields['schedule']} | K{precision['k_bits']}/V{precision['v_bits']}"

    def key(self, model: str) -> str:
        """Return the name of the case's record."""
        seen = "seen" if self.visible else "unseen"
        at = " at the peak" if self.at == "peak" else ""
        return f"{model} | {self.prompt} | {self.group} | {self.budget} | {self.protocol}{at} | {seen}"


@functools.cache
def method_file(name: str) -> Fields:
    """Read a file of conf/method."""
    fields: Fields = yaml.safe_load((METHODS / f"{name}.yaml").read_text())
    return fields


def prompts() -> dict[str, Prompt]:
    """Read the prompts."""
    found = json.loads(PROMPTS.read_text())
    return {
        name: Prompt(
            name, tuple(x["ids"]), x["context_tokens"], tuple(x["gold_ids"]), int(x["new"]), bool(x["past_eos"])
        )
        for name, x in found.items()
    }


def bits(k: int, v: int) -> Fields:
    """Return the change that sets a method's bits."""
    return {"precision": {"k_bits": k, "v_bits": v}}


def cases(model: str) -> list[Case]:
    """List the cases of a model. The first model has all long ones, the other few: they take most of the time."""
    names = sorted(p.stem for p in METHODS.glob("*.yaml"))
    keeps_all = {n for n in names if from_fields(method_file(n)).keeps_all}
    found = []
    for visible in (True, False):
        for n in names:
            budgets = (*BUDGETS, ROOMY) if n in keeps_all else BUDGETS
            found += [Case("short", n, b, visible) for b in budgets]
        found += [Case("short", n, b, visible, "paper") for n in FAMILY for b in BUDGETS]
        found += [Case("short", n, "25%", visible, changes=changes) for n, changes in PROMPT_ONLY]
    # Long outputs: a method evicts many times while decoding, or packs what it goes on keeping.
    evicts = {n for n in names if from_fields(method_file(n)).evicts}
    found += [
        Case("long", n, LONG_ROOMY if n in keeps_all else LONG, at="peak" if n in evicts else "prompt") for n in names
    ]
    found += [Case("long", n, LONG_TOKENS, protocol="paper", changes={"beta": 32}) for n in FAMILY]
    if model == MODELS[0]:
        found += [Case("long", n, LONG_TOKENS, at="peak") for n in sorted(evicts)]
        found += [Case("long", n, LONG_TOKENS, changes={"beta": 16}) for n in ("H2O", "2d_hetero")]
        found += [Case("long", n, LONG_TOKENS, changes=changes, at="peak") for n, changes in OTHER_WAYS]
        found += [Case("long", n, LONG_TOKENS, at="peak", changes=changes) for n, changes in AT_THE_PEAK]
    for n in DECODING:
        own = tuple(method_file(n)["precision"].values())
        if model == MODELS[0]:
            found += [Case("long", n, LONG_TOKENS, changes=bits(*p), at="peak") for p in PAIRS if p != own]
        else:
            found.append(Case("long", n, LONG_TOKENS, visible=False, changes=bits(8, 4), at="peak"))
    return found


PROMPT_ONLY: tuple[tuple[str, Fields], ...] = (
    *(("SnapKV", bits(*p)) for p in ((8, 8), (8, 4), (4, 4), (2, 2))),
    ("PyramidKV", bits(8, 4)),
    ("RippleKV", bits(4, 4)),
    ("KVZip_uniform", bits(8, 4)),
    ("MoEZip", bits(8, 4)),
    ("MoEZip", {"scorer": {"mode": "recon"}}),
    ("Random", bits(16, 4)),
    ("Knorm", bits(8, 16)),
    ("AdaKV", bits(8, 8)),
    ("KVZip", bits(8, 4)),
    ("KVZip", bits(4, 4)),
    ("2d_hetero", {"allocator": {"table": "kl", "extend_lattice": False}}),
    ("2d_hetero", {"allocator": {"solver": "greedy"}}),
    ("2d_hetero", {"allocator": {"solver": "greedy_paper"}}),
    ("2d_hetero", {"allocator": {"cost": "eq1"}}),
    ("ripple_2d_head", {"allocator": {"solver": "greedy"}}),
    ("RippleKV", {"allocator": {"signal": "local", "r": 1.25}}),
)
OTHER_WAYS: tuple[tuple[str, Fields], ...] = (
    ("StreamingLLM", {"scorer": {"reindex": True}, "beta": 4}),
    ("SnapKV", {"schedule": "every", "beta": 16, "recent": 8, "scorer": {"window": 8}}),
    ("Knorm", {"schedule": "every", "beta": 16}),
    ("H2O", {"beta": 8}),
)
AT_THE_PEAK: tuple[tuple[str, Fields], ...] = (("SnapKV", {}), ("KVZip", bits(8, 4)))  # refused: the output grows


def calibrations(model: str, case: Case) -> dict[str, Any]:
    """Return the tensors of each kind of calibration that a case's method may use: its own where it has one."""
    folder = CALIBRATIONS / model
    kinds = sorted({p.stem.split("-")[0] for p in folder.glob("*.safetensors")})
    own = {kind: folder / f"{kind}-{case.method}.safetensors" for kind in kinds}
    chosen = {kind: p if p.exists() else folder / f"{kind}.safetensors" for kind, p in own.items()}
    return {kind: tensors(p) for kind, p in chosen.items() if p.exists()}


@functools.cache
def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a calibration."""
    return load_file(path)


# The records


def digest(value: Any) -> str:
    """Hash a JSON value to twelve hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:12]


def counts(kept: Sequence[Sequence[Sequence[int]]]) -> list[Any]:
    """Count each layer's entries: one number, or one per head where heads differ."""
    found = [[len(p) for p in heads] for heads in kept]
    return [c[0] if len(set(c)) == 1 else c for c in found]


def record(
    *,
    tokens: Sequence[int],
    nll: float | None,
    kept: Sequence[Sequence[Sequence[int]]],
    kept_end: Sequence[Sequence[Sequence[int]]],
    **rest: Any,
) -> Fields:
    """Make a record small: long lists become their hashes."""
    many = len(tokens) > READABLE
    said: Fields = {"tokens": list(tokens[:READABLE])}
    if many:
        said |= {"generated": len(tokens), "tokens_hash": digest(list(tokens))}
    return {
        **said,
        "nll": None if nll is None else round(nll, 4),
        **rest,
        "entries": counts(kept),
        "entries_end": counts(kept_end),
        "kept": [digest(heads) for heads in kept],
        "kept_end": [digest(heads) for heads in kept_end],
    }


def error(e: Exception) -> Fields:
    """Record an error's class and first line."""
    return {"error": f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"}


def compute(model: str) -> dict[str, Fields]:
    """Make the records of one model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums is part of a record
    try:
        return _compute(model)
    finally:
        torch.set_num_threads(threads)


def _compute(model: str) -> dict[str, Fields]:
    loaded, asked = load(model), prompts()
    found: dict[str, Fields] = {}
    together: dict[tuple[str, bool], list[tuple[str, Any]]] = defaultdict(list)
    for case in cases(model):
        key = case.key(model)
        if key in found:
            raise ValueError(f"two cases have the key {key}")
        found[key] = {}
        try:
            made = bound(loaded, case, asked[case.prompt], calibrations(model, case))
            together[case.prompt, case.visible].append((key, made))
        except Exception as e:  # a refusal is a result, and so is a traceback
            found[key] = error(e)
    for (name, visible), jobs in together.items():
        try:
            outs = run(loaded, asked[name], [b for _, b in jobs], visible)
        except Exception:  # of one of them: each by itself says of which
            outs = []
            for _, b in jobs:
                try:
                    outs += run(loaded, asked[name], [b], visible)
                except Exception as e:
                    outs.append(error(e))
        found |= {key: out for (key, _), out in zip(jobs, outs, strict=True)}
    return found


# The comparison


def read() -> tuple[int | None, dict[str, Fields]]:
    """Read the committed records and the version of the engine that made them; none where there is no file."""
    if not RECORDS.exists():
        return None, {}
    found = json.loads(RECORDS.read_text())
    return found["engine_version"], found["records"]


def write(records: Mapping[str, Fields]) -> None:
    """Write the records, one a line."""
    lines = [f"{json.dumps(k)}:{json.dumps(records[k], separators=(',', ':'))}" for k in sorted(records)]
    RECORDS.write_text(f'{{"engine_version":{engine_version()},"records":{{\n' + ",\n".join(lines) + "\n}}\n")


def changed(old: Mapping[str, Fields], new: Mapping[str, Fields]) -> dict[str, list[str]]:
    """Name the fields in which each case changed; a case that is new or gone has the one field that says so."""
    found: dict[str, list[str]] = {}
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new:
            found[key] = ["new case" if key in new else "case is gone"]
            continue
        a, b = old[key], json.loads(json.dumps(new[key]))
        if wrong := [name for name in {**a, **b} if not _same(name, a.get(name), b.get(name))]:
            found[key] = wrong
    return found


def ties(old: Mapping[str, Fields], new: Mapping[str, Fields], changes: Mapping[str, Sequence[str]]) -> set[str]:
    """Name the changed cases that differ in nothing but what one layer holds at the end of the answer."""
    return {
        key
        for key, fields in changes.items()
        if list(fields) == ["kept_end"]
        and sum(a != b for a, b in zip(old[key]["kept_end"], new[key]["kept_end"], strict=True)) == 1
    }


def _same(name: str, a: Any, b: Any) -> bool:
    if name == "nll" and a is not None and b is not None:
        return bool(abs(a - b) < NLL)
    return bool(a == b)


def table(changes: Mapping[str, Sequence[str]]) -> str:
    """Show what changed, a line a case: model, prompt, method, schedule, bits, budget, protocol, question -> fields."""
    rows = [(key.split(" | "), ", ".join(fields)) for key, fields in changes.items()]
    heads = ["model", "prompt", "method", "schedule", "bits", "budget", "protocol", "question"]
    widths = [max(map(len, column)) for column in zip(heads, *(r for r, _ in rows), strict=True)]
    lines = [(heads, "changed"), *rows]
    return "\n".join("  ".join([*(x.ljust(w) for x, w in zip(r, widths, strict=True)), said]) for r, said in lines)


def grouped(changes: Mapping[str, Sequence[str]]) -> str:
    """Show what changed, a line a (method, schedule, bits): how many cases, their fields and the first case."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key in changes:
        groups[" | ".join(key.split(" | ")[2:5])].append(key)
    return "\n".join(
        f"{group}: {len(keys)} cases ({', '.join(_union(changes[k] for k in keys))}), first {keys[0]}"
        for group, keys in sorted(groups.items())
    )


def _union(parts: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(x for part in parts for x in part))


def main() -> int:
    """Compare the records with new ones, print what changed, and write them unless only asked to check."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.records", description="Golden records")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything changed")
    check = parser.parse_args().check
    version, old = read()
    new = {key: r for model in MODELS for key, r in compute(model).items()}
    changes = changed(old, new)
    if changes and not old:
        print(f"{len(new)} new records")
    elif changes:
        print(table(changes))
        print(f"{len(changes)} of {len(new)} records changed")
    else:
        print(f"none of {len(new)} records changed")
    if version not in (None, engine_version()):
        print(f"engine version {version} -> {engine_version()}")
    if changes and version == engine_version() and any(key in new for key in changes if key in old):
        print(f"numbers changed: set ENGINE_VERSION in moend/version.py to {engine_version() + 1}, then run this again")
        return 1
    if check:
        return int(bool(changes) or version != engine_version())
    write(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
