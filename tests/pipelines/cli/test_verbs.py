"""The console command: verbs, lists, completion; the arguments of programs without Hydra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moend import paths
from moend.errors import UserError
from pipelines.cli import args, catalog, completion, verbs

DOORS = Path(verbs.__file__).parents[1]


def test_every_door_is_a_verb_with_a_line_and_at_most_40_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.main(["--help"]) == 0
    said = capsys.readouterr().out
    for door in DOORS.glob("*.py"):
        assert len(door.read_text().splitlines()) <= 40
        if not door.stem.startswith("__"):
            assert f"\n  {door.stem} " in said and door.read_text().startswith(f'"""python -m pipelines.{door.stem} ')


def test_an_unknown_verb_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.main(["reprt"]) == 2
    assert "Did you mean 'report'?" in capsys.readouterr().err
    assert verbs.main([]) == 2


def test_a_verb_gets_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.main(["status", "--help"]) == 0
    assert "squeue" in capsys.readouterr().out


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_everything_is_listed_with_a_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert catalog.main([kind]) == 0
    for line in capsys.readouterr().out.splitlines():
        name, _, said = line.partition(" ")
        assert name and len(said.split()) >= 2, line


def test_a_kind_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert catalog.main(["metods"]) == 2 and "Did you mean 'methods'?" in capsys.readouterr().err
    assert catalog.main([]) == 2


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["sta"], ["status"]),
        (["run", "meth"], ["method="]),
        (["run", "method=Str"], ["method=StreamingLLM"]),
        (["run", "method=1d,Snap"], ["method=1d,SnapKV"]),
        (["run", "-m", "+sweep=ripple_table5"], ["+sweep=ripple_table5"]),
        (["status", "wa"], ["watch=true"]),
        (["list", "mo"], ["models"]),
        (["run", "nothing=x"], []),
    ],
)
def test_completion(words: list[str], found: list[str]) -> None:
    assert completion.candidates(words, verbs.verbs()) == found


@pytest.mark.process
def test_bash_completes(tmp_path: Path) -> None:
    """The script of bash, asked as bash asks it."""
    (tmp_path / "moend").write_text(f'#!/bin/sh\nexec {sys.executable} -m pipelines "$@"\n')
    (tmp_path / "moend").chmod(0o755)
    ask = (
        f"PATH={tmp_path}:$PATH; source <(moend completion bash); COMP_LINE='moend run method=TO';"
        "COMP_POINT=${#COMP_LINE}; _moend; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, cwd=DOORS.parent, check=False)
    assert done.stdout.strip() == "TOVA", done.stderr


def test_arguments() -> None:
    defaults = {"sweep": "latest", "watch": "false"}
    assert args.parse(["watch=true"], defaults) == {"sweep": "latest", "watch": "true"}
    for wrong, said in (
        (["watch=yes"], "watch is true or false, got 'yes'"),
        (["sweep"], "sweep needs a value: sweep=latest"),
        (["swep=a"], "Did you mean 'sweep'?"),
    ):
        with pytest.raises(UserError, match=said.replace("?", r"\?")):
            args.parse(wrong, defaults)


def test_folders_inside_the_package_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "moend")
    (tmp_path / "conf").mkdir()
    assert paths.folder("conf") == tmp_path / "conf"
    (tmp_path / "moend" / "conf").mkdir(parents=True)
    assert paths.folder("conf", "method") == tmp_path / "moend" / "conf" / "method"
    with pytest.raises(RuntimeError, match="lacks the folder sweeps"):
        paths.folder("sweeps")
