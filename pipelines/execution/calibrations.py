"""Calibrations are computed and saved where they are missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moend import paths
from moend.version import ENGINE_VERSION
from pipelines.cli import terminal
from pipelines.planning.facts import Facts
from pipelines.planning.needs import CalibrationNeed, target
from pipelines.planning.schema import RunConfig
from pipelines.store.files import share_all

if TYPE_CHECKING:
    from moend.calibration import Artefact
    from moend.models.load import LoadedModel


def calibrate(
    config: RunConfig, facts: Facts, need: CalibrationNeed, folder: Path, load: Callable[[], LoadedModel]
) -> Artefact:
    """The artefact a cell needs, verified against its identity: of the store, of the package, or measured now.

    folder: where it lies in the store afterwards. load: loads the model, where it must be measured.
    """
    import torch

    from moend.calibration import Artefact, Bench, kind
    from moend.calibration.base import Examples
    from moend.calibration.saved import Saved
    from moend.models.load import calibration_ids
    from moend.replay import Replay

    if (folder / "artefact.json").exists():
        return Artefact.load(folder, need.identity, need.kind)
    if (packaged := paths.calibration(need.key)) is not None:
        artefact = Artefact.load(packaged, need.identity, need.kind)
        artefact.save(folder)
        share_all(folder)
        return artefact
    begin, asked, loaded = time.perf_counter(), target(config), load()
    scorer = asked.method.make_scorer()
    statistics = None
    for other in facts.calibrations:
        if scorer is not None and other.kind == scorer.statistics != need.kind:
            statistics = Artefact.load(folder.parent / other.key, other.identity, other.kind).tensors
    settings = asked.calibration.own.get(need.kind)  # None: a kind without any
    if isinstance(settings, Examples) and (own := asked.examples(need.kind)).prefix < settings.prefix:
        shorter = f"{need.kind}: prefixes of {own.prefix} tokens instead of {settings.prefix}"
        terminal.say(terminal.console(), f"{shorter}, to fit the {loaded.arch.max_positions} positions of the model")
    replay = Replay(loaded.model, loaded.tokenizer, loaded.arch.max_positions, wording=loaded.spec.reconstruction)
    made = {"key": need.key, "engine": ENGINE_VERSION, "torch": torch.__version__, "device": str(loaded.device)}
    saved = Saved(folder, made, share_all)
    if saved.found:
        terminal.say(terminal.console(), f"going on: {need.kind} [{need.key}] has {saved.found} steps already")
    ids = calibration_ids(loaded, asked.calibration.text, chat=asked.calibration.template == "model")
    bench = Bench(
        loaded,
        torch.tensor([ids], device=loaded.device),
        statistics,
        replay.observe,
        lambda what: terminal.progress(terminal.console(), what),
        saved,
    )
    tensors, info = kind(need.kind).measure(asked, bench)
    artefact = Artefact(need.kind, need.identity, tensors, info | {"seconds": time.perf_counter() - begin})
    artefact.save(folder)
    saved.remove()
    share_all(folder)
    return artefact
