"""HTTP client of SGLang's server, on this machine's loopback."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from asyncrl_plugins.sglang.process import SGLangProcess
from protocol.nesting import read_json
from rollout_server.engines.base import EngineDied

LAST_WORDS_S = 5.0
"""Wait for the end of a process whose connection has broken: it says more than the connection does."""


class SGLangRefused(Exception):
    """SGLang answered with an error of its own; the message is SGLang's."""


class SGLangClient:
    """Every call raises SGLangRefused for an answer that is an error, and EngineDied where none comes."""

    def __init__(self, process: SGLangProcess):
        self._process = process
        # Each running completion has a connection. None is used twice: SGLang closes idle ones at any moment.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            process.url, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )

    async def call(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None) -> Any:
        """Answer to a POST. Without `timeout_s` the end of the process alone ends the wait: a completion takes as long
        as it is."""
        try:
            async with asyncio.timeout(timeout_s), self._session.post(path, json=body or {}) as answer:
                content = await answer.read()
                status, kind = answer.status, answer.content_type
        except TimeoutError as error:
            raise EngineDied(f"SGLang did not answer {path} in {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            await self._process.wait_for_end(LAST_WORDS_S)
            raise EngineDied(self._process.problem or f"SGLang broke off {path}: {error}") from error
        if status != 200:
            raise SGLangRefused(f"SGLang answers {path} with HTTP {status}: {_message(content)}")
        try:
            return read_json(content) if kind == "application/json" else None
        except ValueError as error:
            raise SGLangRefused(f"SGLang answers {path} with JSON that cannot be read: {error}") from error

    async def command(self, path: str, body: dict[str, Any], *, timeout_s: float) -> None:
        """A POST whose answer says in its body whether it succeeded."""
        answer = await self.call(path, body, timeout_s=timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise SGLangRefused(f"SGLang answers {path}: {answer.get('message')}")

    async def close(self) -> None:
        await self._session.close()


def _message(content: bytes) -> str:
    """SGLang's own words of an error, whatever form they have."""
    try:
        answer = read_json(content)
    except ValueError:
        return content.decode(errors="replace")[:2000]
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
