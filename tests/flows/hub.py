"""A stand-in for the Hugging Face hub: it takes commits, and names the newest commits."""

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
    """The content of the hub."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        """Repository → path → bytes."""
        self.private: set[str] = set()
        self.address = ""
        self.newest: dict[str, str] = {}
        """`models/USER/NAME` or `datasets/USER/NAME` → commit."""


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

        def do_GET(self) -> None:
            name = self.path.removeprefix("/api/")
            if name in content.newest:
                return self._answer(200, {"id": name.partition("/")[2], "sha": content.newest[name]})
            name, _, rest = name.removeprefix("models/").partition("/tree/")
            if rest and name in content.repositories:
                files = content.repositories[name]
                return self._answer(200, [{"type": "file", "path": path, "oid": "", "size": 0} for path in files])
            return self._answer(404, {"error": self.path})

        def _create(self, wanted: dict[str, Any]) -> None:
            name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
            content.repositories.setdefault(name, {})
            content.private |= {name} if wanted.get("visibility") == "private" else set()
            self._answer(200, {"url": f"{content.address}/{name}"})

        def _answer(self, status: int, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    content.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield content
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
