"""A stand-in for the Hugging Face hub: what its API asks when a commit is made, what it then holds, and what is new."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from huggingface_hub import ModelCard

TOKEN = "hf_of_a_test"


class Hub:
    """Repository → path → bytes; those that are private; where it is; and what its newest commits are."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.address = ""
        self.newest: dict[str, str] = {}
        """`models/USER/NAME` or `datasets/USER/NAME` → commit."""


@contextmanager
def hub() -> Iterator[Hub]:
    """One at an address of this machine, as long as the context."""
    held = Hub()

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
                every = json.loads(body)["files"]
                files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in every]
                return self._answer(200, {"files": files})
            if rest == "commit":
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        self._files(name)[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                there = {"commitUrl": f"{held.address}/{name}/commit/1", "commitOid": "1", "hookOutput": ""}
                return self._answer(200, {"success": True, **there})
            return self._answer(404, {"error": self.path})

        def do_GET(self) -> None:
            asked = self.path.removeprefix("/api/")
            if asked in held.newest:
                return self._answer(200, {"id": asked.partition("/")[2], "sha": held.newest[asked]})
            return self._answer(404, {"error": self.path})

        def _create(self, asked: dict[str, Any]) -> None:
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            held.repositories.setdefault(name, {})
            held.private |= {name} if asked.get("visibility") == "private" else set()
            self._answer(200, {"url": f"{held.address}/{name}"})

        def _files(self, name: str) -> dict[str, bytes]:
            return held.repositories[name]

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing: pytest shows what a test prints."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield held
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
