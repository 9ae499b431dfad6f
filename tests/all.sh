#!/usr/bin/env bash
# usage: tests/all.sh PYTHON   Everything that must hold, with a Python that has everything installed: `make test` and
# .ci/run call it. The tests' processes compute with one thread each (tests/__init__.py).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }

step "ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .
step "mypy"
"$python" -m mypy
step "the site of docs/"
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict --quiet -d build/site
step "tests"
"$python" -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not slurm"
step "tests on Slurm" # they bring up a Slurm that wants the machine for itself
"$python" -m pytest -m slurm
step "tests with the oldest versions"
tests/oldest.sh "$python"
