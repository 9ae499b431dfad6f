"""Calibrations computed, saved, and read again for tables and figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moend.errors import UserError
from pipelines.cli import terminal
from pipelines.planning import parts
from pipelines.planning.facts import Facts
from pipelines.planning.identity import canonical
from pipelines.planning.needs import (
    CalibrationNeed,
    agreement_settings,
    damage_examples,
    example_texts,
    kl_text,
)
from pipelines.planning.schema import RunConfig

if TYPE_CHECKING:
    import torch

    from moend.calibration import AgreementSettings, Calibration, DamageSettings, RippleSettings
    from moend.calibration.artefact import Artefact
    from moend.methods.spec import Method
    from moend.models.load import LoadedModel, ModelSpec


def calibrate(
    config: RunConfig, facts: Facts, need: CalibrationNeed, folder: Path, load: Callable[[], LoadedModel]
) -> Artefact:
    """Load the artefact in `folder`, verified against the identity it must have, or compute and save it there."""
    from moend.calibration.artefact import Artefact

    if (folder / "artefact.json").exists():
        return Artefact.load(folder, need.identity, need.kind)
    begin = time.perf_counter()
    tensors, info = _measure(config, facts, need, folder, load())
    info["seconds"] = time.perf_counter() - begin
    artefact = Artefact(need.kind, need.identity, tensors, info)
    artefact.save(folder)
    return artefact


def _measure(
    config: RunConfig, facts: Facts, need: CalibrationNeed, folder: Path, loaded: LoadedModel
) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    from moend.calibration.artefact import Artefact
    from moend.calibration.kl import kl_table, named_configs, windows
    from moend.calibration.sensitivity import lattice, measure
    from moend.calibration.trig import TrigStatistics
    from moend.models import load as models

    spec, method, _ = parts.parts(config)
    calibration = parts.calibration(canonical(config.calibration))
    ids = models.calibration_ids(loaded, calibration.text)
    batch = torch.tensor([ids], device=loaded.device)
    info = {"tokens": len(ids), "text": calibration.text or spec.calibration_text}
    if need.kind == "agreement":
        return measure_agreement(spec, method, loaded, calibration)
    if need.kind == "ripple":
        return _ripple(spec, method, loaded, calibration)
    if need.kind == "queries":
        return TrigStatistics.measure(loaded.model, batch).tensors(), info
    statistics = None
    for other in facts.calibrations:
        if other.kind == "queries":
            statistics = Artefact.load(folder.parent / other.key, other.identity, other.kind).tensors
    if need.kind == "damage":
        return _damage(spec, method, loaded, calibration, statistics)
    shared: dict[str, Any] = {
        "eviction": calibration.measured_eviction(method.scorer),
        "scorer": method.make_scorer() if calibration.eviction == "scorer" else None,
        "seeds": calibration.seeds,
        "statistics": statistics,
    }
    if need.kind == "sensitivity":
        found = measure(loaded.model, batch, lattice(calibration.keeps, calibration.bits), **shared)
        return found.tensors(), info
    kl = calibration.kl
    text = _token_ids(loaded, kl_text(calibration), "set calibration.kl.text_file")
    with terminal.progress(terminal.console(), f"KL table of {spec.label}") as step:
        divergence = kl_table(
            loaded.model,
            windows(text, kl.sequences, kl.tokens).to(loaded.device),
            named_configs(kl.configs),
            positions=kl.positions,
            progress=step,
            **shared,
        )
    return divergence.tensors(), {"tokens": kl.sequences * kl.tokens, "text_file": kl.text_file}


def _ripple(
    spec: ModelSpec, method: Method, loaded: LoadedModel, calibration: Calibration
) -> tuple[dict[str, Any], dict[str, Any]]:
    from moend.calibration.ripple import Noise, profile, summary
    from moend.calibration.sweep import Base

    s = calibration.ripple
    ids = _examples(loaded, s, s.examples, "calibration.ripple")
    a = s.relative_noise
    noises = [Noise(a, s.seed)]
    if s.stability:
        noises += [*(Noise(a * f, s.seed) for f in (1 / 3, 1 / 2, 2, 4)), Noise(a, s.seed + 1)]
    scorer = method.make_scorer()
    if scorer is None:
        raise UserError(f"{method.name} has no scorer: nothing could be evicted")
    recent = method.recent if isinstance(method.recent, int) else int(method.recent * s.prefix)
    keeps = sorted(set(s.damage))
    with terminal.progress(terminal.console(), f"ripple profile of {spec.label}") as step:
        made = profile(
            loaded.model,
            ids.to(loaded.device),
            s.window,
            Base(scorer, method.n_sink, recent),
            noises=noises,
            draws=s.draws,
            keeps=keeps,
            progress=step,
        )
    tensors = made.tensors()
    said = summary(tensors, noises, keeps)
    return tensors, {"tokens": ids.numel(), "text": s.text, "text_file": s.text_file, "keeps": keeps, **said}


def _damage(
    spec: ModelSpec,
    method: Method,
    loaded: LoadedModel,
    calibration: Calibration,
    statistics: dict[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    from moend.calibration.damage import damage_table, repeated
    from moend.calibration.sensitivity import Config
    from moend.calibration.sweep import Base

    s = calibration.damage
    scorer = method.make_scorer()
    if scorer is None:
        raise UserError(f"{method.name} has no scorer: nothing could be evicted")
    ids = _examples(loaded, s, damage_examples(s), "calibration.damage")
    parts = {kind: ids[i :: len(s.kinds)] for i, kind in enumerate(s.kinds)}  # no kind has another's text
    examples = {k: repeated(x, s.window, s.cue) if k == "recall" else x for k, x in parts.items()}
    with terminal.progress(terminal.console(), f"damage table of {spec.label}") as step:
        made = damage_table(
            loaded.model,
            {kind: x.to(loaded.device) for kind, x in examples.items()},
            s.window,
            [Config(*c) for c in s.configs],
            Base(scorer, method.n_sink, method.recent),
            method.storage,
            every=s.every,
            heads=method.make_allocator().divides_heads,
            statistics=statistics,
            progress=step,
        )
    info = {"tokens": ids.numel(), "kinds": list(s.kinds), "text": s.text, "text_file": s.text_file}
    return made.tensors(), info


def measure_agreement(
    spec: ModelSpec, method: Method, loaded: LoadedModel, calibration: Calibration
) -> tuple[dict[str, Any], dict[str, Any]]:
    from moend.calibration.agreement import BITS, token_agreement

    s = agreement_settings(calibration, spec)
    ids = _examples(loaded, s, s.examples, "calibration.agreement")
    with terminal.progress(terminal.console(), f"token agreement on {spec.label}") as step:
        hits = token_agreement(
            loaded.model,
            ids.to(loaded.device),
            s.window,
            method.storage,
            dtype=loaded.store_dtype,
            progress=step,
        )
    shares = {str(b): float(h.float().mean()) for b, h in zip(BITS, hits, strict=True)}
    info = {"text": s.text, "text_file": s.text_file, "tokens": hits[0].numel(), "agreement": shares}
    return {"hits": hits.to("cpu").byte()}, info


def _examples(
    loaded: LoadedModel, s: RippleSettings | DamageSettings | AgreementSettings, count: int, name: str
) -> torch.Tensor:
    """(count, prefix + window) ids, the BOS included: disjoint windows of the calibration's text."""
    import torch

    from moend.benchmarks.prompts import added_bos
    from moend.calibration.kl import windows

    bos = list(added_bos(loaded.tokenizer))
    tokens = s.prefix + s.window - len(bos)
    if s.prefix + s.window > loaded.arch.max_positions:
        raise UserError(
            f"{name}: {s.prefix} + {s.window} tokens are more than the {loaded.arch.max_positions} positions of "
            f"{loaded.spec.label}"
        )
    remedy = f"set {name}.text (calibration=recall for recall_moe)"
    found = [_token_ids(loaded, text, remedy) for text in example_texts(s, count)]
    cut = torch.tensor(found)[:, :tokens] if s.text == "recall" else windows(found[0], count, tokens)
    return torch.cat([torch.tensor([bos] * count, dtype=torch.long).view(count, -1), cut], dim=1)


def _token_ids(loaded: LoadedModel, text: str, remedy: str) -> list[int]:
    """The ids of a text as it stands; refused where a tenth of its words are unknown."""
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    unknown_id = loaded.tokenizer.unk_token_id
    if unknown_id is not None and ids.count(unknown_id) > len(ids) // 10:
        raise UserError(f"{loaded.spec.label} does not know the words of the text: {remedy}")
    return ids
