"""The web page of `asyncrl inspect` and its server, which only reads. It listens on loopback unless told otherwise."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import signal
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from asyncrl.errors import BadStateError, UserError
from asyncrl.run_folder.failure import unreadable_as_user_error
from asyncrl.telemetry.recorder import read_status
from asyncrl_plugins.viewer.inspect.filters import ORDERS, STATUSES, read_query
from asyncrl_plugins.viewer.inspect.pictures import for_browser
from asyncrl_plugins.viewer.inspect.records import detail_record, row_record
from asyncrl_plugins.viewer.inspect.token_levels import LEGENDS, TITLES
from asyncrl_plugins.viewer.samples.model import SampleQuery
from asyncrl_plugins.viewer.samples.store import SampleStore

REQUEST_TIMEOUT_S = 10.0
"""Time after which a silent connection is closed."""
MOST_ROWS = 500
KEPT_GROUPS = 8
"""Groups whose images are kept, so that a page may fetch them without the group being read again."""
_PAGE_FOLDER = Path(__file__).parent / "page"


def _page_file(name: str) -> str:
    return (_PAGE_FOLDER / name).read_text(encoding="utf-8")


@cache
def _page() -> tuple[bytes, str]:
    """Join markup, styles and script into one page, and return it with its Content-Security-Policy.

    The browser runs this page's own script and nothing that a sample could bring in.
    """
    style = "\n".join(map(_page_file, ("theme.css", "tokens.css", "inspect.css")))
    script = "\n".join(map(_page_file, ("tokens.js", "address.js", "group.js", "inspect.js")))
    page = _page_file("index.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return page.encode(), policy


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class InspectServer(ThreadingHTTPServer):
    """The constructor opens the port, or raises UserError; `serve_forever` answers."""

    daemon_threads = True

    def __init__(self, store: SampleStore, run_dir: Path, host: str, port: int):
        self.store, self.run_dir, self.host = store, run_dir, host
        self.images = lru_cache(KEPT_GROUPS)(lambda ticket_id: self.store.detail(ticket_id).all_images)
        """Images of a group; a page asks for them one by one."""
        self.address_family = AF_INET6 if ":" in host else AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"cannot listen on {host} port {port}: {error}. Name another port, or --web 0 for any free one"
            ) from error

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # a browser that went away is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: InspectServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "asyncrl", ""
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        if not self.__is_host_allowed():
            self.__fail(HTTPStatus.MISDIRECTED_REQUEST, "this server is not reached by that name")
            return
        path, _, query = self.path.partition("?")
        try:
            with unreadable_as_user_error():
                self.__answer(path.split("/")[1:], dict(parse_qsl(query)))
        except UserError as error:
            self.__fail(HTTPStatus.BAD_REQUEST, str(error))
        except BadStateError as error:
            self.__fail(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    do_HEAD = do_GET

    def __is_host_allowed(self) -> bool:
        """Refuse foreign names: else a web site whose name resolves to this machine could read the samples."""
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            if name not in ("localhost", self.server.host.lower()):
                ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def __answer(self, path: list[str], words: Mapping[str, str]) -> None:
        match path:
            case [""]:
                self.__send("text/html; charset=utf-8", _page()[0])
            case ["api", "run"]:
                self.__send_json(self.__run())
            case ["api", "samples"]:
                self.__send_json(self.__samples(words))
            case ["api", "sample", ticket_id]:
                self.__send_json(detail_record(self.server.store.detail(_whole("ticket", ticket_id))))
            case ["image", digest]:
                self.__image(digest, _whole("ticket", words.get("ticket", "")))
            case _:
                self.__fail(HTTPStatus.NOT_FOUND, "there is no such page")

    def __run(self) -> dict[str, Any]:
        total = self.server.store.find(SampleQuery(), limit=1).total
        status = read_status(self.server.run_dir)
        return {
            "path": str(self.server.run_dir),
            "samples": total,
            **{name: status.get(name) for name in ("phase", "step", "total_steps")},
            "statuses": STATUSES,
            "orders": ORDERS,
            "colourings": [{"name": name, "title": TITLES[name], "legend": LEGENDS[name]} for name in LEGENDS],
        }

    def __samples(self, words: Mapping[str, str]) -> dict[str, Any]:
        query = read_query(words)
        offset, limit = _whole("offset", words.get("offset", "0")), _whole("limit", words.get("limit", "50"))
        page = self.server.store.find(query, limit=min(max(limit, 1), MOST_ROWS), offset=offset)
        rows = [row_record(row) for row in page.rows]
        return {"total": page.total, "offset": offset, "rows": rows}

    def __image(self, digest: str, ticket_id: int) -> None:
        images = [image for image in self.server.images(ticket_id) if image.hash == digest]
        shown = for_browser(images[0]) if images else None
        if shown is None:
            self.__fail(HTTPStatus.NOT_FOUND, f"ticket {ticket_id} has no image {digest} that could be shown")
        else:
            self.__send(*shown, keep="private, max-age=3600, immutable")

    def __send_json(self, value: Any) -> None:
        self.__send("application/json", json.dumps(value, separators=(",", ":")).encode())

    def __fail(self, status: HTTPStatus, reason: str) -> None:
        self.__send("application/json", json.dumps({"error": reason}).encode(), status)

    def __send(self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK, keep: str = "no-store") -> None:
        self.send_response(status)
        headers = {
            "Content-Security-Policy": _page()[1],
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Content-Type": kind,
            "Cache-Control": keep,
            "Content-Length": str(len(body)),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal keeps the address in sight."""


def serve(
    store: SampleStore, run_dir: Path, host: str, port: int, opened: Mapping[str, str | None], ticket_id: int | None
) -> None:
    """Serve the page until it is interrupted. `opened` has the words of the address: filters and colouring."""
    with InspectServer(store, run_dir, host, port) as server:
        words = {name: value for name, value in opened.items() if value}
        if ticket_id is not None:
            words["sample"] = str(ticket_id)
        print(f"{server.url}{'?' if words else ''}{urlencode(words)}   (Ctrl-C ends it)", flush=True)
        if not _is_loopback(host):
            print(f"warning: anyone who reaches {host} can read any sample of {run_dir}", file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a process in the background ends in order, too
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise UserError(f"{name} {text[:40]!r} is not a whole number from 0")
    return int(text)
