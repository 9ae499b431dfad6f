"""Long English text that may be shipped: an excerpt of The Jargon File (public domain), and the user's own files."""

from __future__ import annotations

import gzip
import re
from functools import cache
from importlib import resources
from pathlib import Path

from moend.benchmarks.rows import decode
from moend.errors import Blocked

# The first part is for calibration, the rest for evaluation: no window of one reaches into the other.
CALIBRATION_SHARE = 0.2
# Windows are cut in characters before any tokenizer is known; English takes 4 to 5 characters a token in 32k to 150k
# vocabularies, so this many always hold enough tokens.
CHARS_PER_TOKEN = 5.5


@cache
def bundled() -> str:
    """The whole excerpt: paragraphs of ASCII prose, separated by blank lines."""
    packed = resources.files("moend.benchmarks").joinpath("data/jargon.txt.gz").read_bytes()
    return gzip.decompress(packed).decode("ascii")


def part(split: str, file: str | None = None) -> str:
    """The calibration or test part of the bundled text or of a UTF-8 file, cut at a paragraph or line."""
    if file is None:
        text = bundled()
    else:
        path = Path(file).expanduser()
        if not path.is_file():
            raise Blocked(f"the text {path} is not here")
        text = decode(path.read_bytes(), str(path)).replace("\r\n", "\n")
    cut = text.find("\n", int(len(text) * CALIBRATION_SHARE)) + 1
    return (text[:cut] if split == "calibration" else text[cut:]).strip("\n")


@cache
def words() -> tuple[str, ...]:
    """The distinct words of the bundled text that it holds in lower case, of 4 to 12 letters, in alphabetical order."""
    return tuple(sorted(set(re.findall(r"(?<![A-Za-z'-])[a-z]{4,12}(?![A-Za-z'-])", bundled()))))
