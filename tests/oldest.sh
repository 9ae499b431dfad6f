#!/usr/bin/env bash
# usage: tests/oldest.sh PYTHON   Tests what touches private parts of libraries with the oldest versions declared.
# PYTHON is of a virtual environment with everything: the second one lies over it and holds only what differs.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
venv=${MOEND_OLDEST_VENV:-.venv-oldest}
base=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$1" -m venv "$venv"
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$base" >"$own/zz_newest.pth" # searched after its own packages
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r constraints-oldest.txt
export PYTHONPATH="$PWD"
"$venv/bin/python" -m tests.oldest
"$venv/bin/python" -m pytest -m "versions and not slow and not slurm"
