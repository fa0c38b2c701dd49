"""A stand-in for the Hugging Face hub: it takes commits, names the newest commits, and gives files of models."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from huggingface_hub import ModelCard

TOKEN = "hf_of_a_test"


class Hub:
    """The content of the hub."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        """Repository → path → bytes."""
        self.private: set[str] = set()
        self.address = ""
        self.newest: dict[str, str] = {}
        """`models/USER/NAME` or `datasets/USER/NAME` → commit."""
        self.commits: dict[str, dict[str, bytes]] = {}
        """`USER/NAME@COMMIT` → path → bytes, of models that can be loaded."""
        self.failing: dict[str, int] = {}
        """Path → status of the answer to a request for it; 0 closes the connection without an answer."""
        self.asked: list[str] = []
        """Revisions that files were asked from."""


def _digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # as in git


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "oid": _digest(content), "size": len(content)}


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve a hub on this machine while the block runs."""
    content = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid credentials"})
            if self.path == "/api/repos/create":
                return self._create(json.loads(body))
            if self.path == "/api/validate-yaml":
                ModelCard(json.loads(body)["content"])  # raises where its metadata are no YAML
                return self._answer(200, {"errors": [], "warnings": []})
            name, _, rest = self.path.removeprefix("/api/models/").rpartition("/")[0].rpartition("/")
            if rest == "preupload":
                paths = [file["path"] for file in json.loads(body)["files"]]
                files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
                return self._answer(200, {"files": files})
            if rest == "commit":
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        content.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    if line["key"] == "deletedFile":
                        del content.repositories[name][line["value"]["path"]]
                commit = {"commitUrl": f"{content.address}/{name}/commit/1", "commitOid": "1", "hookOutput": ""}
                return self._answer(200, {"success": True, **commit})
            return self._answer(404, {"error": self.path})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                return self._file(*self.path.removeprefix("/").split("/resolve/"))
            name, _, revision = self.path.removeprefix("/api/").partition("/revision/")
            if name in content.newest and revision in ("", "main"):
                return self._answer(200, {"id": name.partition("/")[2], "sha": content.newest[name]})
            name, _, rest = name.removeprefix("models/").partition("?")[0].partition("/tree/")
            files = content.repositories.get(name, content.commits.get(f"{name}@{rest.partition('/')[0]}"))
            if rest and files is not None:
                return self._answer(200, [_entry(path, body) for path, body in files.items()])
            code = "RevisionNotFound" if f"models/{name}" in content.newest else "RepoNotFound"
            return self._answer(404, {"error": self.path}, {"X-Error-Code": code})

        def _file(self, name: str, place: str) -> None:
            revision, _, path = place.partition("/")
            content.asked.append(revision)
            commit = content.newest[f"models/{name}"] if revision == "main" else revision
            body = content.commits[f"{name}@{commit}"].get(path)
            if path not in content.failing and body is not None:
                self._answer(200, body, {"X-Repo-Commit": commit, "ETag": f'"{_digest(body)}"'})
            elif status := content.failing.get(path, 404):
                self._answer(
                    status, {}, {"X-Repo-Commit": commit} | ({"X-Error-Code": "EntryNotFound"} if status == 404 else {})
                )

        def _create(self, wanted: dict[str, Any]) -> None:
            name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
            content.repositories.setdefault(name, {})
            content.private |= {name} if wanted.get("visibility") == "private" else set()
            self._answer(200, {"url": f"{content.address}/{name}"})

        def _answer(self, status: int, answer: Any, headers: Mapping[str, str] = MappingProxyType({})) -> None:
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    content.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield content
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
