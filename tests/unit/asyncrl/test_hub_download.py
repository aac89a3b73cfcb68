"""Models of the hub, from a hub on loopback that answers what huggingface_hub asks for a snapshot."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.rigs.tiny import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_one_who_may"
UNWANTED = {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "README.md": b"tiny"}
CHILD = """
import json, os, sys
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import model_folder
for name, token in json.loads(sys.argv[1]):
    os.environ.update({"HF_TOKEN": token} if token else {})
    try:
        print(json.dumps(["folder", str(model_folder(ModelConfig(path=name)))]))
    except UserError as error:
        print(json.dumps(["refused", str(error)]))
"""


class Hub(ThreadingHTTPServer):
    """`acme/tiny` is public, `acme/private` needs TOKEN, `acme/cut` hangs up; others are not there."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.requests: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/(acme/\w+)/(revision|tree)/([^/]+)", path):
            self._describe(*found.groups())
        elif found := re.fullmatch(rf"/(acme/\w+)/resolve/{COMMIT}/(.+)", path):
            self._file(*found.groups())
        else:
            self._answer(404)

    do_HEAD = do_GET

    def _describe(self, repository: str, what: str, revision: str) -> None:
        if repository == "acme/private" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"X-Error-Code": "RepoNotFound"})  # as the hub says it to strangers
        if repository == "acme/cut":
            self.close_connection = True
            return None
        if repository not in ("acme/tiny", "acme/private"):
            return self._answer(401, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        files = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.server.files.items()
        ]
        body: Any = files if what == "tree" else {"id": repository, "sha": COMMIT, "siblings": []}
        return self._answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _file(self, repository: str, name: str) -> None:
        data = self.server.files[name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._answer(200, headers, data)

    def _answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in tiny_model.iterdir() if file.is_file()}
    with Hub(files | UNWANTED) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join(timeout=10)


def ask(hub: Hub, home: Path, *names: tuple[str, str], offline: str = "0") -> list[list[str]]:
    """Each name is looked for in one process, whose huggingface_hub is told of all this in its environment."""
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(ROOT),
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(names)],
        env=kept | settings, cwd=home, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_model_of_the_hub_is_downloaded_once_and_then_found_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    ((kind, folder),) = ask(hub, tmp_path, ("acme/tiny", ""))
    assert kind == "folder"
    there = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    assert there == {name: data for name, data in hub.files.items() if name not in UNWANTED}
    before = len(hub.requests)
    again, refused = ask(hub, tmp_path, ("acme/tiny", ""), ("acme/other", ""), offline="1")
    assert again == ["folder", folder]
    assert refused[0] == "refused"
    assert "HF_HUB_OFFLINE forbids downloads: set it to 0, or run once" in refused[1]
    assert len(hub.requests) == before, "offline nobody is asked"


def test_what_the_hub_does_not_give_is_refused_with_the_fix(hub: Hub, tmp_path: Path) -> None:
    names = ("acme/missing", "acme/tiny@v2", "acme/private", "acme/cut")
    *refused, private = ask(hub, tmp_path, *((name, "") for name in names), ("acme/private", TOKEN))
    for name, (kind, said) in zip(names, refused, strict=True):
        assert kind == "refused"
        assert said.startswith(
            f"model.path is '{name}': there is no such folder in {tmp_path}, and the hub at http://127"
        )
        assert said.endswith(
            "Check name and network, and log in for a private or gated model (hf auth login, or HF_TOKEN)"
        )
    causes = [re.findall(r"does not give it \((\w+):", said)[0] for _, said in refused]
    denied = "RepositoryNotFoundError"
    assert causes == [denied, "RevisionNotFoundError", denied, "RemoteProtocolError"]
    assert private[0] == "folder", "HF_TOKEN is heeded"
