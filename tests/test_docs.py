"""The pages of docs: what they tell people to type works, and what they point to is there."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
ELSEWHERE = {"adding.md"}  # tests/test_adding.py runs it


def blocks(page: Path) -> list[str]:
    """The code blocks of a page that are marked as shell commands."""
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p) and p.name not in ELSEWHERE], ids=lambda p: p.name)
def test_the_shell_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """In an empty folder, one after the other, as they stand; `python` is the one of the tests."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks(page))],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@functools.cache
def messages() -> list[str]:
    """Every text of the source but docstrings, with a line break where a value stands."""
    found = []
    for path in [p for folder in ("moend", "pipelines") for p in (ROOT / folder).rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(x.value if isinstance(x, ast.Constant) else "\n" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                found.append(node.value)
    return found


TROUBLE = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_there_are_25_messages() -> None:
    assert len(TROUBLE) == len(set(TROUBLE)) == 25


@pytest.mark.parametrize("message", TROUBLE)
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    """`...` stands for a value, but for the one message whose own text has it."""
    pieces = re.split(r"\s*\.\.\.\s*", message)
    literal = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    assert any(literal.search(text) for text in messages())


def test_a_message_that_is_gone_is_found() -> None:
    assert not any("the cache is already squeezed" in text for text in messages())
    assert any("unknown \n '\n'.\n Choices: \n" in text for text in messages())


COMMAND = re.compile(
    r"(?:^ {4,}|^|`)((?:[A-Z_]+=\S+ )*(?:python -m [a-z][\w.]*|moend [a-z]+|make|pip)\b[^`\n]*)", re.MULTILINE
)
WHY_NOT = {  # a command that no test types, and why
    r"make |pip ": "builds an environment, or runs this suite; tests/test_packaging.py installs the wheel",
    r"python -m perf": "measures for minutes to hours; tests/perf runs its parts in small",
    r"python -m pytest": "runs this suite",
    r"python -m tests": "writes pages and golden records anew; the tests of these compare them",
    r"moend [a-z]+$": "a name, not a command",
    r".*\+sweep=(?!quickstart)": "tests/pipelines/execution/test_every_sweep.py runs every sweep file",
    r".*(\.\.\.|<\w+>|\bNAME\b|\bDIR\b|\bN\b|/models/|\$G\b|-GGUF)": "has a placeholder, or a file of the reader's",
    r".*--config-dir my_conf": "tests/test_adding.py runs it in the folder that it needs",
    r"python -m pipelines\.export": "a shell block of its page, which runs as it stands",
}


def commands() -> list[str]:
    """Every command of README and docs, without its comment and its variables.

    The findings are dated: they tell what was typed on that day.
    """
    found = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(p for p in PAGES if "findings" not in p.name)):
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        for match in COMMAND.finditer(text):
            command = re.sub(r"\s+#.*", "", match[1]).strip()
            command = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", command)
            if not re.match(r"moend (?!list|run|calibrate|choose|export|completion)", command):  # else a sentence
                found.append(command)
    return sorted(set(found))


TYPED = [c for c in commands() if not any(re.match(why, c) for why in WHY_NOT)]


def test_most_commands_are_typed() -> None:
    assert len(TYPED) > 15
    assert all(any(re.match(why, c) for c in commands()) for why in WHY_NOT)  # no reason outlives its command
    for name in re.findall(r"\+sweep=(\w+)", "\n".join(commands())):
        assert name == "NAME" or (ROOT / "sweeps" / "sweep" / f"{name}.yaml").is_file(), name


@pytest.mark.slow
@pytest.mark.parametrize("command", TYPED)
def test_a_command_is_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs are planned (`dry_run=true`); what reads a store reads an empty one, and says that and nothing else."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MOEND_STORE", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    verb, *args = shlex.split(re.sub(r"^(python -m pipelines\.|moend )", "", command))
    if verb in ("run", "calibrate", "choose", "prefetch") and "--help" not in args:
        tail = ["-m"] * ("-m" in args)
        args = [*(a for a in args if a != "-m"), "dry_run=true", f"paths.store={tmp_path}", *tail]
        args = [a for a in args if not a.startswith("cluster")]  # a submission is tested in tests/slurm
    args = [a for a in args if a not in ("watch=true", "push=true")]
    code = importlib.import_module(f"pipelines.{verb}").main(args)
    said = "".join(capsys.readouterr())
    assert code in (0, 2, 3)
    if code == 2:
        assert re.search(
            r"no sweep was run into|blocked|infeasible|no key for|cannot meet|cannot be (downloaded|fetched)", said
        ), said
