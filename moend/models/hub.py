"""Models of the Hugging Face hub: which commit a name means, where its files lie, and how they are fetched."""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path

from moend.errors import Blocked, UserError
from moend.models.spec import ModelSpec, missing_weights

log = logging.getLogger(__name__)


def is_off() -> bool:
    """Whether the environment forbids asking the hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def label(spec: ModelSpec) -> str:
    """A repository and its commit, as messages name them."""
    return f"{spec.id}@{(spec.revision or 'main')[:12]}"


def advice(spec: ModelSpec, cache_dir: Path) -> str:
    """What to do without network, as a sentence for an error."""
    revision = f" --revision {spec.revision}" if spec.revision else ""
    return (
        f"Without network: run 'hf download {spec.id}{revision}' elsewhere and copy the folder into "
        f"{roots(cache_dir)[-1]}, or set model=hf model.id=/path/to/folder"
    )


def roots(cache_dir: Path) -> list[Path]:
    """Where hub snapshots may lie: Hugging Face's own cache, then ours. Downloads go to the last.

    A cache that the environment names (HF_HOME, HF_HUB_CACHE) is used for downloads too; otherwise everything that is
    written stays in our one cache folder.
    """
    from huggingface_hub import constants

    theirs = Path(constants.HF_HUB_CACHE)
    if any(os.environ.get(k) for k in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")):
        return [theirs]
    return [theirs, cache_dir / "hub"]


def _is_commit(revision: str | None) -> bool:
    return bool(revision and re.fullmatch(r"[0-9a-f]{40}", revision))


def commit_of(spec: ModelSpec, cache_dir: Path, *, network: bool) -> str | None:
    """The commit a spec means: pinned, else the one this machine saw first, else the hub's (None if not to be had)."""
    if _is_commit(spec.revision):
        return spec.revision
    revision = spec.revision or "main"
    for root in roots(cache_dir):
        ref = root / _repo_folder(spec) / "refs" / revision
        if ref.is_file():
            return ref.read_text(encoding="ascii").strip()
    found = ask(str(spec.id), revision, str(roots(cache_dir)[-1])) if network else None
    return None if found is None else Path(found).name


@functools.lru_cache(maxsize=256)  # a plan asks once per cell
def ask(id_: str, revision: str, root: str) -> str | None:
    """The snapshot folder (named by its commit) with the small config file, which also records the commit a branch is.

    None where the hub cannot be reached or does not have it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            id_, revision=revision, cache_dir=root, allow_patterns=["config.json"], etag_timeout=5
        )
    except (LocalEntryNotFoundError, HfHubHTTPError) as e:
        log.debug("cannot resolve %s@%s: %s", id_, revision, e)
        return None
    return str(folder)


def _repo_folder(spec: ModelSpec) -> str:
    return f"models--{str(spec.id).replace('/', '--')}"


def snapshot(spec: ModelSpec, cache_dir: Path) -> Path | None:
    """A complete snapshot on this machine, or None."""
    commit = commit_of(spec, cache_dir, network=False)
    for root in roots(cache_dir) if commit else []:
        folder = root / _repo_folder(spec) / "snapshots" / str(commit)
        has_config = (folder / "config.json").is_file() or spec.gguf_file
        if folder.is_dir() and has_config and not missing_weights(folder, spec):
            return folder
    return None


def fetch(spec: ModelSpec, cache_dir: Path) -> Path:
    """The snapshot's folder, downloaded where it is missing (only what is loaded, not other formats of the weights)."""
    if folder := snapshot(spec, cache_dir):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    root = roots(cache_dir)[-1]
    allow = ["*.json", "*.jinja", "*.txt", "tokenizer.model", *(["*.py"] if spec.trust_remote_code else [])]
    if spec.gguf_file:
        allow.append(spec.gguf_file)
    else:
        allow.append("*.safetensors" if spec.use_safetensors else "*.bin")
    try:
        folder = Path(
            snapshot_download(
                str(spec.id),
                revision=commit_of(spec, cache_dir, network=True) or spec.revision,
                cache_dir=root,
                allow_patterns=allow,
                ignore_patterns=["consolidated*", "original/*"],  # the same weights once more in another layout
                etag_timeout=10,
            )
        )
    except GatedRepoError:
        raise Blocked(
            f"model '{spec.name}': {spec.id} asks you to accept its licence at https://huggingface.co/{spec.id}, "
            "then run 'hf auth login'"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"model.revision '{spec.revision}' does not exist in {spec.id}") from None
    except RepositoryNotFoundError:
        raise UserError(f"model.id '{spec.id}' is not on the hub (or private: run 'hf auth login')") from None
    except LocalEntryNotFoundError as e:
        why = str(e.__cause__ or e).split(". ")[0].splitlines()[0]
        raise Blocked(
            f"model '{spec.name}': {label(spec)} cannot be downloaded ({why}). {advice(spec, cache_dir)}"
        ) from None
    except (HfHubHTTPError, OSError) as e:
        raise Blocked(f"model '{spec.name}': {label(spec)} cannot be downloaded ({str(e).splitlines()[0]})") from e
    if missing := missing_weights(folder, spec):
        raise UserError(f"model '{spec.name}' ({label(spec)}): {missing}")
    return folder
