"""Long answers survive: a generation that stops anywhere goes on from its last saved state, with the same tokens."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from moend.benchmarks.base import Rendered, Sample
from moend.budget import Budget
from moend.calibration.artefact import Artefact
from moend.calibration.queries import TrigStatistics
from moend.decoding import Decoder, Generation, Job, Outcome
from moend.engine import Engine
from moend.hf.config import arch_of
from moend.methods.bind import BoundMethod, bind
from moend.methods.spec import method
from moend.models import load as models
from moend.saved import Saved, Slot
from tests.tiny import tiny

NEW = 44
FOUR, EIGHT = {"k_bits": 4, "v_bits": 4}, {"k_bits": 8, "v_bits": 8}
# Stores and states of every kind: K groups with archives, residual windows, accumulated attention, held queries, heads
# of unequal length, positions that StreamingLLM turns, layers of two kinds of bits.
CELLS: dict[str, dict[str, Any]] = {
    "full": {},
    "KIVI": {"group": 16, "window": 16},
    "SnapKV": {"precision": FOUR},
    "SnapKV every": {"precision": FOUR, "schedule": "every", "beta": 8, "group": 16},
    "H2O": {"precision": EIGHT, "beta": 8, "group": 16},
    "TOVA": {},
    "RKV": {"precision": FOUR, "beta": 8, "group": 16},
    "StreamingLLM": {},
    "Scissorhands": {"beta": 8},
    "AdaKV": {},
    "AdaKV every": {"precision": EIGHT, "schedule": "every", "beta": 8, "group": 16},
    "KVZip": {"precision": EIGHT},
    "2d_uniform": {"beta": 8, "group": 16},
}


def load(tmp: Path, architecture: str = "", **extra: Any) -> Any:
    """The small trained model, or a random one of an architecture in its place, without an end."""
    loaded = models.load(models.spec("recall_moe"), tmp)
    if architecture:
        model = tiny(architecture, vocab_size=140, **extra)
        loaded = dataclasses.replace(loaded, model=model, arch=arch_of(model.config))
    return loaded


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("cache"))


def cell(loaded: Any, name: str) -> BoundMethod:
    artefacts = {}
    made = method(name.split()[0], **CELLS.get(name, {}))
    if "queries" in made.calibrations:
        ids = torch.arange(3, 120)[None]
        artefacts["queries"] = Artefact("queries", {}, TrigStatistics.measure(loaded.model, ids).tensors(), {})
    return bind(
        made,
        Budget.parse("95%" if name == "KIVI" else "60%"),
        "matched",
        loaded.arch,
        t_ref=None,
        store_dtype=None,
        artefacts=artefacts,
    )


def prompt(loaded: Any, new: int = NEW, length: int = 110) -> Rendered:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 130, (length,), generator=generator).tolist()
    sample = Sample("t", "one", "", "", "", ("a",))
    return Rendered(sample, tuple(ids), length - 5, new, gold_ids=(20, 21, 22))


class Stopped(Exception):
    """Stands for a kill."""


def outcome(out: Outcome) -> dict[str, Any]:
    """All that a record takes from an outcome, but for seconds."""
    told = {f.name: getattr(out, f.name) for f in dataclasses.fields(out) if not f.name.endswith("_seconds")}
    return {k: v for k, v in told.items() if k != "peak_bytes"}


def unending(loaded: Any) -> Engine:
    engine = Engine(loaded)
    engine.decoder.eos = frozenset()
    return engine


def survive(
    loaded: Any, jobs: list[Job], folder: Path, stops: list[int], monkeypatch: pytest.MonkeyPatch, **how: Any
) -> tuple[list[list[Outcome]], int]:
    """The outcomes of a run that is stopped after so many forward passes, again and again; and the passes of all runs.

    A state is saved after every third step. ends: whether answers may end by themselves.
    """
    prompts, ends = how.pop("prompts", None) or [prompt(loaded)], how.pop("ends", False)
    passes, steps = [0], [0]
    plain = Decoder._forward
    left: list[int] = list(stops)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes[0] += 1
        if left and passes[0] >= left[0]:
            passes[0], _ = 0, left.pop(0)
            raise Stopped
        return plain(self, *args, **kwargs)

    def third(self: Any) -> bool:
        steps[0] += 1
        return steps[0] % 3 == 0

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_forward", forward)
        patch.setattr(Slot, "due", property(third))
        total = 0
        while True:
            saved = Saved(folder, "example", {"cell": 1}, 0)
            try:
                engine = Engine(loaded) if ends else unending(loaded)
                out = engine.run_questions(prompts, jobs, saved=saved, **how)
                return out, total + passes[0]
            except Stopped:
                total += passes[0]


@pytest.mark.parametrize("name", CELLS)
def test_a_stopped_answer_ends_with_the_tokens_of_one_left_alone(
    name: str, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job(cell(loaded, name), name="a")]
    ((alone,),) = unending(loaded).run_questions([prompt(loaded)], jobs)
    ((out,),), _ = survive(loaded, jobs, tmp_path, [15, 24], monkeypatch)
    assert len(out.token_ids) == NEW
    assert outcome(out) == outcome(alone)


def test_what_was_generated_is_not_generated_again(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job(cell(loaded, "SnapKV"), name="a")]
    stops = [12, 14, 20]
    _, passes = survive(loaded, jobs, tmp_path, stops, monkeypatch)
    fed = 1 + 1 + NEW - 1  # the prompt's last token, the gold text, and every token but the last
    assert passes <= fed + 3 * len(stops) + len(stops)


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [True, False])
def test_sampled_rows_that_end_at_different_tokens(
    fuse: bool, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that ended before the state was saved keep their outcomes, and the sampler goes on where it was."""
    jobs = [Job(cell(loaded, n), draw, name=n) for n in ("H2O", "SnapKV") for draw in range(3)]
    how = Generation(temperature=6.0)
    plain, made = Engine.__init__, {"fuse": fuse}
    monkeypatch.setattr(Engine, "__init__", lambda self, loaded: plain(self, loaded, **made))
    (alone,) = Engine(loaded).run_questions([prompt(loaded)], jobs, how, seed=4)
    assert len({len(o.token_ids) for o in alone}) >= 3
    (outs,), _ = survive(loaded, jobs, tmp_path, [9, 20], monkeypatch, ends=True, generation=how, seed=4)
    assert [outcome(o) for o in outs] == [outcome(o) for o in alone]


@pytest.mark.parametrize("turns", [False, True])
def test_questions_and_turns(turns: bool, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in any question, earlier ones included; a turn goes on with the cache that the turns before left."""
    first = prompt(loaded, 16)
    later = [(9, 30, 31, 32 + i) if turns else (*first.ids[: first.context_tokens], 9, 30 + i) for i in range(2)]
    asked = [first, *(dataclasses.replace(first, ids=ids, sample=dataclasses.replace(first.sample, id=f"q{i}"))
                      for i, ids in enumerate(later))]  # fmt: skip
    jobs = [Job(cell(loaded, n), name=n) for n in ("H2O", "SnapKV every")]
    how: dict[str, Any] = {"generation": Generation(temperature=3.0), "turns": turns, "question_visible": False}
    alone = Engine(loaded).run_questions(asked, jobs, **how)
    found, _ = survive(loaded, jobs, tmp_path, [8, 19, 33], monkeypatch, ends=True, prompts=asked, **how)
    assert [[outcome(o) for o in outs] for outs in found] == [[outcome(o) for o in outs] for outs in alone]


@pytest.mark.parametrize(("architecture", "extra"), [("mistral", {"sliding_window": 48}), ("qwen3", {})])
def test_other_architectures(
    architecture: str, extra: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a window among them."""
    loaded = load(tmp_path / "cache", architecture, **extra)
    for name in ("TOVA", "SnapKV"):
        jobs = [Job(cell(loaded, name), name="a")]
        ((alone,),) = unending(loaded).run_questions([prompt(loaded)], jobs)
        ((out,),), _ = survive(loaded, jobs, tmp_path / name, [15, 24], monkeypatch)
        assert outcome(out) == outcome(alone), name


def test_a_state_of_something_else_or_damaged_is_removed_with_a_word(loaded: Any, tmp_path: Path) -> None:
    lines: list[str] = []

    def slot(identity: dict[str, Any], **own: Any) -> Slot:
        return Saved(tmp_path, "example", identity, 0, tell=lines.append).slot("0", own)

    slot({"cell": 1}, seed=1).save({"step": 3}, {"x": torch.arange(3)})
    facts, tensors = slot({"cell": 1}, seed=1).load() or ({}, {})
    assert facts == {"step": 3} and tensors["x"].tolist() == [0, 1, 2]
    for other in ({"cell": 2}, {"cell": 1, "more": 0}):
        assert slot(other, seed=1).load() is None
        assert "is of another engine, other cells or another question, and is removed" in lines.pop() and not lines
        assert list(tmp_path.iterdir()) == []
        slot({"cell": 1}, seed=1).save({}, {})
    assert slot({"cell": 1}, seed=2).load() is None and lines.pop()
    slot({"cell": 1}).save({}, {"x": torch.arange(9)})
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert slot({"cell": 1}).load() is None
    assert "cannot be read" in lines.pop() and not list(tmp_path.iterdir())


def test_another_engine_version_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moend import saved

    Saved(tmp_path, "example", {}, 0).slot("0", {}).save({}, {})
    monkeypatch.setattr(saved, "ENGINE_VERSION", saved.ENGINE_VERSION + 1)
    assert Saved(tmp_path, "example", {}, 0).slot("0", {}).load() is None


def test_a_full_disk_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moend import saved

    slot = Saved(tmp_path, "example", {}, 0).slot("0", {})
    slot.save({"step": 1}, {"x": torch.arange(3)})

    def full(*args: Any) -> None:
        raise saved.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(saved, "save_file", full)
    with pytest.raises(OSError, match="No space left") as e:
        slot.save({"step": 2}, {"x": torch.arange(3)})
    assert e.value.errno == 28
    assert (slot.load() or ({}, {}))[0] == {"step": 1} and len(list(tmp_path.iterdir())) == 1


LONG = 2048
PROGRAM = """
import json, sys
from pathlib import Path
from tests.moend import test_saved as here
folder, name, temperature = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
saved = None if sys.argv[4] == "alone" else here.Saved(folder, "example", {}, 0.05)
((out,),) = here.long_answer(folder / "cache", name, temperature, saved)
print(json.dumps(out.token_ids))
"""


def long_answer(cache: Path, name: str, temperature: float, saved: Saved | None) -> list[list[Outcome]]:
    """2,048 tokens of a random model."""
    loaded = load(cache, "llama", layers=2)
    how = Generation(temperature=temperature)
    jobs = [Job(cell(loaded, name), name="a")]
    return unending(loaded).run_questions([prompt(loaded, LONG)], jobs, how, saved=saved)


def steps(folder: Path) -> int:
    """Tokens that the state of a running answer holds, 0 before there is one."""
    for path in folder.glob("example-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            return int(file.metadata()["step"])
    return 0


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("name", "temperature"), [("H2O", 0.0), ("RKV", 1.0)])
def test_2048_tokens_killed_at_five_random_moments(name: str, temperature: float, tmp_path: Path) -> None:
    """By SIGKILL, wherever the process is; a greedy and a sampled answer of methods that quantise and evict."""
    rng = random.Random()
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), name, str(temperature)]
    moments, kills = sorted(rng.sample(range(100, LONG - 150), 5)), 0
    while moments:
        running = subprocess.Popen([*command, "saved"], cwd=root, stdout=subprocess.PIPE)
        while running.poll() is None and steps(tmp_path) < moments[0]:
            time.sleep(0.02)
        time.sleep(rng.random() / 10)
        running.kill()
        running.communicate()
        assert running.returncode == -signal.SIGKILL, "it ended before it was killed"
        moments, kills = moments[1:], kills + 1
    (path,) = tmp_path.glob("example-*.safetensors")
    assert path.is_file() and kills == 5
    last, alone = (
        json.loads(subprocess.run([*command, how], cwd=root, check=True, capture_output=True).stdout)
        for how in ("saved", "alone")
    )
    assert len(alone) == LONG and last == alone
