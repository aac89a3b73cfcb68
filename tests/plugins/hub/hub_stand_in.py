"""A hub on loopback: what huggingface_hub asks to make a repository, to send files through git-lfs, and to commit."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TOKEN = "hf_of_the_one_who_may_write"
LARGE = 4096
"""Bytes from which a file goes through git-lfs."""


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with its files. `broken`: the beginning of a request, such as `PUT`, of which the
    server hangs up in the middle."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.requests: list[str] = []
        self.broken = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        path, length = urlsplit(self.path).path, int(self.headers.get("Content-Length") or 0)
        asked = f"{self.command} {path}"
        self.server.requests.append(asked)
        if self.server.broken and asked.startswith(self.server.broken):
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(length)
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            found = re.match(r"---\n.*?\n---\n", json.loads(body)["content"], re.DOTALL)
            self._answer(200 if found else 400, {"warnings": [], "errors": [] if found else [{"message": "no YAML"}]})
        elif found := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.server.objects[found[1]] = body
            self._answer(200, {})
        elif found := re.fullmatch(r"/(?:api/models/)?(\w+/\w+)(?:\.git/info/lfs/objects|/(\w+))?/?(\w+)?", path):
            self._repository(found[1], found[2] or found[3] or "", body)
        else:
            self._answer(404, {"error": path})

    do_GET = do_POST = do_PUT = _serve

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        is_new = name not in self.server.repositories
        self.server.repositories.setdefault(name, {})
        self.server.private.setdefault(name, asked.get("visibility") == "private")
        self._answer(200 if is_new else 409, {"url": f"{self.server.address}/{name}", "id": name})

    def _repository(self, name: str, what: str, body: bytes) -> None:
        files = self.server.repositories.get(name)
        if files is None:
            self._answer(404, {"error": "Repository not found"})
        elif what in ("", "revision"):
            self._answer(200, {"id": name, "sha": "0" * 40, "siblings": [{"rfilename": file} for file in files]})
        elif what == "preupload":
            described = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                    "oid": _git_oid(files[file["path"]]) if file["path"] in files else None,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": described})
        elif what == "batch":
            objects = [
                {"oid": one["oid"], "size": one["size"]}
                | (
                    {}
                    if one["oid"] in self.server.objects
                    else {"actions": {"upload": {"href": self._large(one["oid"])}}}
                )
                for one in json.loads(body)["objects"]
            ]
            self._answer(200, {"objects": objects, "transfer": "basic"}, "application/vnd.git-lfs+json")
        elif what == "commit":
            self._commit(name, files, [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": what})

    def _large(self, oid: str) -> str:
        return f"{self.server.address}/lfs/{oid}"

    def _commit(self, name: str, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        self.server.commits.append(lines[0]["value"]["summary"])
        oid = f"{len(self.server.commits):040x}"
        self._answer(
            200, {"success": True, "commitOid": oid, "commitUrl": f"{self.server.address}/{name}/commit/{oid}"}
        )

    def _answer(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for header, value in {"Content-Type": kind, "Content-Length": str(len(data))}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _git_oid(data: bytes) -> str:
    """Name of a small file's contents in git, or of those of a large one in git-lfs."""
    if len(data) >= LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join(timeout=10)
