"""The shell's completion of `moend`: verbs, groups and their options, sweeps; read from file names, in milliseconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from moend import paths
from moend.errors import UserError, unknown
from pipelines.cli.args import program

ASK = "__complete"
HYDRA = ("run", "calibrate", "choose", "prefetch")  # verbs that compose a configuration
OTHERS: Mapping[str, Sequence[str]] = {
    "status": ("sweep=", "watch=true", "jobs=false", "paths.store="),
    "cancel": ("sweep=", "paths.store="),
    "report": ("sweep=", "rescore=true", "paths.store="),
    "list": ("methods", "models", "benchmarks", "sweeps", "figures"),
    "bundle": ("pack", "add", "sweep=", "file=", "paths.store="),
    "export": ("plan", "statistics", "to=kvpress", "to=trtllm", "to=sglang", "to=vllm", "to=triattention", "out="),
    "completion": ("bash", "zsh", "fish"),
}
SCRIPTS = {
    "bash": """_moend() {
  local line="${COMP_LINE:0:COMP_POINT}" words
  read -r -a words <<<"$line"
  [[ $line == *' ' ]] && words+=('')
  mapfile -t COMPREPLY < <(moend __complete "${words[@]:1}" 2>/dev/null)
  [[ ${words[-1]} == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")  # bash takes what follows = for a word of its own
  [[ ${COMPREPLY[0]} == *= || ${words[-1]} == *=* ]] && compopt -o nospace 2>/dev/null
}
complete -F _moend moend""",
    "zsh": """#compdef moend
_moend() {
  local -a found
  found=(${(f)"$(moend __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  compadd -Q -S '' -- $found
}
compdef _moend moend""",
    "fish": """complete -c moend -f -a '(moend __complete (commandline -opc)[2..] (commandline -ct))'""",
}
USAGE = """Print the completion script of a shell.

  moend completion bash|zsh|fish

bash: source <(moend completion bash); zsh: the same after compinit; fish: moend completion fish | source"""


def candidates(words: Sequence[str], verbs: Mapping[str, str]) -> list[str]:
    """Everything that may stand where the last of `words` stands, beginning with what is typed of it."""
    *before, typed = words or [""]
    if not before:
        return [v for v in (*verbs, "completion") if v.startswith(typed)]
    key, equals, value = typed.partition("=")
    if before[0] not in HYDRA:
        return [x for x in OTHERS.get(before[0], ()) if x.startswith(typed)]
    conf = paths.folder("conf")
    if not equals:
        groups = sorted(p.name for p in conf.iterdir() if p.is_dir() and p.name != "hydra")
        keys = [f"{g}=" for g in groups] + ["budget=", "seed=", "question_visible=", "dry_run=", "+sweep=", "-m"]
        return [k for k in keys if k.startswith(typed)]
    folder = paths.folder("sweeps", "sweep") if key == "+sweep" else conf / key
    first, comma, last = value.rpartition(",")  # method=1d,2d: the last one is being typed
    return [f"{key}={first}{comma}{p.stem}" for p in sorted(folder.glob("*.yaml")) if p.stem.startswith(last)]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    if len(args) != 1:
        raise UserError(f"completion of which shell? {', '.join(SCRIPTS)}")
    if args[0] not in SCRIPTS:
        raise unknown("shell", args[0], list(SCRIPTS))
    sys.stdout.write(SCRIPTS[args[0]] + "\n")
    return 0
