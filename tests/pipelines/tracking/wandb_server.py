"""As much of a W&B server as wandb's own upload program needs: it keeps what it is sent, and can be told to misbehave.

`python -m tests.pipelines.tracking.wandb_server` is not a program: tests start `Server()` in a thread.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOW = "2026-01-01T00:00:00"


class Server(ThreadingHTTPServer):
    """runs: id -> what its last upload said. files: path -> bytes. refuse: the status that every query gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.uploads: Counter[str] = Counter()
        self.artifacts: dict[str, str] = {}  # digest -> name
        self.views: dict[str, dict[str, Any]] = {}  # dashboards and reports
        self.committed: set[str] = set()
        self.requests: list[bytes] = []
        self.keys: set[str] = set()
        self.refuse = 0
        self.slow = 0.0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed hang up; that is no error of ours."""

    def answer(self, query: dict[str, Any]) -> dict[str, Any]:
        """The data of one GraphQL query."""
        given = query.get("variables") or {}
        name = re.match(r"\s*(?:query|mutation)\s+(\w+)", query["query"])[1]  # type: ignore[index]
        if name == "UpsertBucket":
            with self.lock:
                run = self.runs.setdefault(given["name"], {"history": {}, "exits": 0})
                if given["groupName"]:  # the first of an upload; a later one only repeats the config
                    run |= {k: given[k] for k in ("groupName", "displayName", "jobType", "tags", "host", "entity")}
                run["config"] = {k: v["value"] for k, v in json.loads(given["config"]).items()}
                run["project"] = given["project"]
            entity = {"id": "e", "name": given["entity"] or "somebody"}
            bucket = {
                "id": given["name"], "name": given["name"], "displayName": given["displayName"], "config": "{}",
                "description": None, "sweepName": None, "historyLineCount": 0,
                "project": {"id": "p", "name": given["project"], "entity": entity},
            }  # fmt: skip
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if name == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/put/{given['run']}/{f}"} for f in given["files"]]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        if name == "CreateArtifact":
            digest = given["input"]["digest"]
            with self.lock:
                self.artifacts[digest] = given["input"]["artifactCollectionName"]
            made = {"id": digest, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": made}}
        if name == "CreateArtifactManifest":
            at = f"{self.url}/put/{given['artifactID']}/manifest"
            file = {"id": "f", "name": "m", "displayName": "m", "uploadUrl": at, "uploadHeaders": []}
            return {"createArtifactManifest": {"artifactManifest": {"id": given["artifactID"], "file": file}}}
        if name == "CreateArtifactFiles":
            edges = []
            for f in given["input"]["artifactFiles"]:
                at = f"{self.url}/put/{f['artifactID']}/{f['name']}"
                node = {
                    "id": "f", "name": f["name"], "displayName": f["name"], "uploadUrl": at, "uploadHeaders": [],
                    "storagePath": "x", "uploadMultipartUrls": None, "artifact": {"id": f["artifactID"]},
                }  # fmt: skip
                edges.append({"node": node})
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if name == "CommitArtifact":
            with self.lock:
                self.committed.add(given["artifactID"])
            return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": given["artifactID"]}}}
        if name == "Viewer" or "viewer {" in query["query"]:
            who = {"id": "u", "entity": "somebody", "username": "somebody", "email": "", "flags": "{}"}
            return {"viewer": {**who, "teams": {"edges": []}}}
        if name == "GetProjects":
            page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
            return {"models": {"pageInfo": page, "edges": []}}
        if name == "UpsertModel" or "upsertModel(" in query["query"]:
            return {"upsertModel": {"model": {"id": "p", "name": "moend"}, "project": {"id": "p"}, "inserted": True}}
        if "upsertView(" in query["query"]:
            with self.lock:
                id = given.get("id") or f"view-{len(self.views)}"
                self.views[id] = given
            return {
                "upsertView": {"view": {**_view(given), "id": id, "name": given["name"] or "view"}, "inserted": True}
            }
        return {}

    def stream(self, run: str, sent: dict[str, Any]) -> None:
        """History lines overwrite from their offset on."""
        with self.lock:
            lines = sent.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            for i, line in enumerate(lines["content"]):
                self.runs[run]["history"][lines["offset"] + i] = json.loads(line)
            if sent.get("complete"):
                self.runs[run]["exits"] += 1
                self.runs[run]["exit_code"] = sent.get("exitcode")


def _view(given: dict[str, Any]) -> dict[str, Any]:
    project = {"id": "p", "name": given["projectName"], "entityName": given["entityName"]}
    return {
        "type": given["type"], "displayName": given["displayName"], "description": given.get("description"),
        "spec": given["spec"], "project": project, "user": {"username": "somebody"}, "updatedAt": NOW, "createdAt": NOW,
    }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(self.rfile.readline().strip(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data

    def _reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def do_GET(self) -> None:
        self._reply(404, {})

    def do_POST(self) -> None:
        data = self._body()
        self.server.requests.append(data)
        self.server.keys.add(self.headers.get("authorization", ""))
        time.sleep(self.server.slow)
        if self.server.refuse:
            self._reply(self.server.refuse, {"errors": [{"message": "user is not logged in"}]})
        elif self.path.endswith("/graphql"):
            self._reply(200, {"data": self.server.answer(json.loads(data))})
        else:
            self.server.stream(self.path.split("/")[4], json.loads(data))
            self._reply(200, {})

    def do_PUT(self) -> None:
        data = self._body()
        with self.server.lock:
            self.server.files[self.path.removeprefix("/put/")] = data
            self.server.uploads[self.path.removeprefix("/put/")] += 1
        self._reply(200, {})
