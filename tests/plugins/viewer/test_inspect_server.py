"""The server of `asyncrl inspect`'s page, asked without a browser."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from pathlib import Path

import pytest

from asyncrl.errors import UserError
from asyncrl_plugins.viewer.inspect.server import InspectServer
from asyncrl_plugins.viewer.inspect.token_levels import LEGENDS
from tests.plugins.viewer.made_up_samples import GROUP_SIZE, GROUPS, HOSTILE_TICKET, png


def ask(server: InspectServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_server_pages_and_filters(server: InspectServer) -> None:
    status, headers, body = ask(server, "/api/samples?reward=<0&limit=10&offset=55")
    answer = json.loads(body)
    assert status == 200
    assert (answer["total"], answer["offset"], len(answer["rows"])) == (60, 55, 5)
    assert headers["X-Content-Type-Options"] == "nosniff"
    run = json.loads(ask(server, "/api/run")[2])
    assert run["samples"] == GROUPS * GROUP_SIZE
    assert [one["name"] for one in run["colourings"]] == list(LEGENDS)


def test_the_server_shows_a_group_and_its_images(server: InspectServer) -> None:
    group = json.loads(ask(server, "/api/sample/7")[2])
    image = group["images"][0]
    status, headers, body = ask(server, f"/image/{image['hash']}?ticket=7")
    assert (status, headers["Content-Type"]) == (200, "image/png")
    assert body == png(7)
    assert ask(server, f"/image/{image['hash']}?ticket=8")[0] == 404
    assert ask(server, f"/image/{'ab' * 32}?ticket={HOSTILE_TICKET}")[0] == 404, "bytes that are no image stay here"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/samples?step=x", 400),
        ("/api/samples?offset=-1", 400),
        ("/api/samples?step=99999999999999999999", 400),
        ("/api/samples?staleness=1e999", 400),
        ("/api/sample/99", 400),
        ("/api/sample/../../etc/passwd", 404),
        ("/image/x", 400),
        ("/nowhere", 404),
    ],
)
def test_a_bad_address_is_answered_with_a_reason(server: InspectServer, path: str, status: int) -> None:
    got, headers, body = ask(server, path)
    assert (got, headers["Content-Type"]) == (status, "application/json")
    assert json.loads(body)["error"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("[::1", 421),
    ],
)
def test_a_web_site_cannot_read_samples_by_its_own_name(server: InspectServer, host: str, status: int) -> None:
    got, _, body = ask(server, "/api/sample/7", Host=host)
    assert got == status
    assert (b"trajectories" in body) is (status == 200)


def test_the_server_only_reads(server: InspectServer) -> None:
    assert [ask(server, "/api/samples", method)[0] for method in ("POST", "PUT", "DELETE")] == [501] * 3


def test_a_silent_connection_is_closed(server: InspectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.RequestHandlerClass, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert silent.recv(100) == b""


def test_a_port_that_is_taken_is_named(server: InspectServer, tmp_path: Path) -> None:
    port = server.server_address[1]
    with pytest.raises(UserError, match=f"port {port}"):
        InspectServer(server.store, tmp_path, "127.0.0.1", port)
