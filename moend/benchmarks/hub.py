"""One file of a data set on the hub, at a pinned commit: found in the cache, or fetched without a loading script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moend.errors import Blocked
from moend.models.hub import is_off, roots


@dataclass(frozen=True)
class HubFile:
    """cache: the folder that fetched data lies in; None is Hugging Face's own."""

    repo: str  # data set repository on the hub
    file: str  # path of the file in it
    revision: str  # commit
    cache: Path | None = None

    def cached(self) -> Path | None:
        """Where it lies on this machine. No network."""
        from huggingface_hub import try_to_load_from_cache

        for root in roots(self.cache) if self.cache else [None]:
            found = try_to_load_from_cache(
                self.repo, self.file, cache_dir=root, repo_type="dataset", revision=self.revision
            )
            if isinstance(found, str):
                return Path(found)
        return None

    def unavailable(self) -> str | None:
        """Why it cannot be had: it is not here and the hub is switched off."""
        if self.cached() or not is_off():
            return None
        return f"{self.repo} is not in the hub cache and the hub is off: set benchmark.data_dir to its JSONL files"

    def absent(self) -> str | None:
        """What would be fetched, where it is not here."""
        return None if self.cached() else f"{self.repo}@{self.revision[:12]} is not on this machine yet"

    def get(self) -> Path:
        """Its path, fetched where it is not here; Blocked where that fails."""
        if found := self.cached():
            return found
        from huggingface_hub import hf_hub_download

        root = roots(self.cache)[-1] if self.cache else None
        try:
            return Path(
                hf_hub_download(self.repo, self.file, repo_type="dataset", revision=self.revision, cache_dir=root)
            )
        except OSError as e:  # every error of the hub's client, and of the disk
            first = str(e).strip().split("\n")[0]
            raise Blocked(f"{self.repo} cannot be fetched ({first}): set benchmark.data_dir to its JSONL files") from e
