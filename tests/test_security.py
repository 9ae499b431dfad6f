"""What SECURITY.md promises of the source: no pickle, no remote code.

Planted keys are looked for where runs are tested: in tests/pipelines/tracking/test_tracking.py and in
tests/pipelines/cluster/test_run_local.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import ROOT

FILES = sorted(p for folder in ("moend", "pipelines", "hydra_plugins") for p in (ROOT / folder).rglob("*.py"))
MAY = {
    "moend/interop/export.py": "torch.save",  # TriAttention's layout, on request
    "pipelines/reporting/published/__init__.py": "yaml.load",  # files of the package itself, by yaml's safe loader in C
}
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def odd(tree: ast.AST) -> list[str]:
    """What of a source could run what a file holds, by line."""
    found = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"{node.lineno}: imports {n}" for n in names if n.partition(".")[0] in LOADERS]  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        called, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called == "torch.load" and given.get("weights_only") != "True":
            found.append(f"{node.lineno}: torch.load without weights_only=True")
        if called in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
            found.append(f"{node.lineno}: {called} of pickles")
        if called in ("yaml.load", "yaml.unsafe_load", "eval", "exec", "torch.save"):
            found.append(f"{node.lineno}: {called}")
        if given.get("trust_remote_code") == "True":
            found.append(f"{node.lineno}: trusts remote code")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_runs_what_a_file_holds(path: Path) -> None:
    found = odd(ast.parse(path.read_text(encoding="utf-8")))
    for name, call in MAY.items():
        found = [x for x in found if not (path.match(name) and x.endswith(f": {call}"))]
    assert not found


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from dill import loads", "torch.load(p)", "torch.load(p, weights_only=False)", "yaml.load(t)",
     "np.load(p, allow_pickle=True)", "M.from_pretrained(p, trust_remote_code=True)", "torch.save(x, p)"],
)  # fmt: skip
def test_what_is_odd_is_found(source: str) -> None:
    assert len(odd(ast.parse(source))) == 1
    assert not odd(ast.parse("torch.load(p, weights_only=True); yaml.safe_load(t); spec(trust_remote_code=x)"))
