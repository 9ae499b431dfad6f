"""python -m pipelines.export: a plan, or query statistics, in the form that another tool reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moend.errors import UserError, unknown
from pipelines.cli.args import parse, program
from pipelines.store.files import write_atomic

USAGE = """A plan, or query statistics, in the form that another tool reads.

  python -m pipelines.export plan FILE to=kvpress [tokens=N] [lossy=false] [out=FILE]
  python -m pipelines.export plan FILE to=trtllm|sglang|vllm [lossy=false] [out=FILE]
  python -m pipelines.export statistics FOLDER to=triattention out=FILE pickle=true

  FILE    a plan.json of pipelines.calibrate, or of a cell
  FOLDER  a calibration of kind queries: artefact.json and data.safetensors
  to      the tool. docs/export.md says what each reads
  tokens  kvpress: length of the prompt that it will compress; the plan's own reference length by default
  lossy   true: write what the form can hold, where the plan says more
  out     the file; a plan is shown where it is missing
  pickle  true: you want the pickle that TriAttention reads; read one back with weights_only=True

Exit codes: 0 written or shown, 2 a mistake, or a plan that the form cannot hold."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    if args[:1] not in (["plan"], ["statistics"]) or len(args) < 2 or "=" in args[1]:
        raise UserError("say what: export plan FILE to=kvpress, or export statistics FOLDER to=triattention out=FILE")
    (_plan if args[0] == "plan" else _statistics)(Path(args[1]), args[2:])
    return 0


def _plan(file: Path, rest: list[str]) -> None:
    from moend.interop.export import export_plan
    from moend.plan import RoutingPlan

    values = parse(rest, {"to": "", "tokens": "", "lossy": "false", "out": ""})
    if values["tokens"] and not values["tokens"].isdecimal():
        raise UserError(f"tokens must be a whole number >= 1, got '{values['tokens']}'")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{file} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    tokens = int(values["tokens"]) if values["tokens"] else None
    plan = RoutingPlan.from_json(text, str(file))
    said = export_plan(plan, values["to"], tokens=tokens, lossy=values["lossy"] == "true")
    if values["out"]:
        write_atomic(Path(values["out"]), said if said.endswith("\n") else said + "\n")
    print(values["out"] or said.rstrip("\n"))


def _statistics(folder: Path, rest: list[str]) -> None:
    from moend.calibration.artefact import Artefact
    from moend.interop.export import save_triattention

    values = parse(rest, {"to": "triattention", "out": "", "pickle": "false"})
    if values["to"] != "triattention":
        raise unknown("form of statistics", values["to"], ("triattention",))
    if not values["out"]:
        raise UserError("out=FILE is missing: TriAttention's statistics are a file of tensors")
    save_triattention(Artefact.load(folder), Path(values["out"]), pickle=values["pickle"] == "true")
    print(values["out"])
