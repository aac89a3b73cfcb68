"""The `python` tool: each call is a fresh process that is bounded in time, memory, files and output.

It contains accidents, not attackers: an endless loop, a fork bomb, `rmtree("/")`. Where somebody may mean to
break out, run the rollout server in a container. In the process (`sandbox_child.py`):

    system calls   no process can be started or signalled, no socket opened (a seccomp filter; without it nothing runs)
    files          an empty folder of its own; beside it only Python's own files are read (Landlock, where Linux has it)
    limits         CPU and wall time, address space, size of a file, environment empty, output cut

What the program shows and whether it failed come back on a pipe of their own, so that nothing printed is taken for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.environments.interface import ToolError
from asyncrl.errors import UserError
from asyncrl_plugins.tools.environment import ToolContext

CHILD = str(Path(__file__).with_name("sandbox_child.py"))
MAX_RESULT_BYTES = 64 << 20
"""Limit of bytes of a program's output; the rest is not read."""


@dataclass(frozen=True)
class SandboxLimits:
    seconds: float = 5.0
    """Wall time, the start of Python (0.1 s) and its imports included."""
    memory_mib: int = 1024
    """Address space."""
    file_mib: int = 16
    """Largest file that can be written."""
    output_chars: int = 4000
    """Limit of characters of the printed text."""


async def python(code: str, *, ctx: ToolContext) -> list[Any]:
    """Run a Python program and see what it prints.

    code: the program. The images so far are in `images` (PIL), `show(image)` shows one. Nothing is kept between calls.
    """
    return await run_python(code, [image.data for image in ctx.images])


async def run_python(code: str, images: list[bytes], limits: SandboxLimits | None = None) -> list[Any]:
    """Printed text and shown images of a program. Raises ToolError for one that failed.

    Raises RuntimeError where the process cannot be confined.
    """
    limits = limits or SandboxLimits()
    shown = [base64.b64encode(image).decode() for image in images]
    request = json.dumps({"code": code, "images": shown, "limits": asdict(limits)}).encode()
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        ours, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-B", CHILD, str(theirs)),
                cwd=folder,
                env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": folder},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        try:
            with open(ours, "rb", buffering=0) as results:
                printed, result, late = await _finished(process, request, results, limits)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    text = printed.decode(errors="replace").replace("\r\n", "\n")
    if len(text) > limits.output_chars:
        known = f"{len(text) - limits.output_chars} characters more"
        if len(printed) == _most_printed(limits):  # what is over that was not kept
            known = f"at least {known}"
        text = f"{text[: limits.output_chars]}\n[{known} are cut]"
    problem = _problem(process.returncode or 0, result, late, limits)
    if problem or result is None:
        raise ToolError(f"{text.rstrip()}\n{problem}".strip())
    return [*([text] if text or not result["shown"] else []), *(base64.b64decode(each) for each in result["shown"])]


async def check_sandbox(settings: Mapping[str, Any]) -> None:
    """Raise UserError where this machine cannot confine a program."""
    try:
        await run_python("pass", [], SandboxLimits(seconds=60.0))
    except (ToolError, RuntimeError, OSError) as error:
        raise UserError(
            f"the tool `python` cannot run here: {error}. It needs Linux with seccomp filters on x86-64 or ARM64; "
            "leave it out of environment.config.functions, or run the rollout server where they are allowed"
        ) from error


setattr(python, "check", check_sandbox)  # noqa: B010 - a function has no such field for a type checker


async def _finished(
    process: asyncio.subprocess.Process, request: bytes, results: Any, limits: SandboxLimits
) -> tuple[bytes, dict[str, Any] | None, bool]:
    """Printed text, result if there is one, and a flag for a timeout."""
    assert process.stdin is not None
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), results)
    printed, returned = bytearray(), bytearray()
    reads = [
        asyncio.create_task(_read(process.stdout, printed, _most_printed(limits))),
        asyncio.create_task(_read(reader, returned, MAX_RESULT_BYTES)),
    ]
    try:
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(request)
            process.stdin.close()
        _, late = await asyncio.wait({*reads}, timeout=limits.seconds)
    finally:
        for read in reads:
            read.cancel()
        transport.close()
    with suppress(ValueError):
        return bytes(printed), json.loads(returned), bool(late)
    return bytes(printed), None, bool(late)


def _most_printed(limits: SandboxLimits) -> int:
    """Bytes of so many characters, at most four each."""
    return 4 * limits.output_chars


async def _read(stream: asyncio.StreamReader, into: bytearray, most: int) -> None:
    """Read to the end; what is over `most` bytes is thrown away."""
    while chunk := await stream.read(1 << 16):
        into += chunk[: max(0, most - len(into))]


def _problem(code: int, result: dict[str, Any] | None, late: bool, limits: SandboxLimits) -> str:
    if late or code == -signal.SIGXCPU:
        return f"timed out after {limits.seconds:g} s"
    if result is not None and result.get("unconfined"):
        raise RuntimeError(result["unconfined"])
    if result is not None:
        return result["error"]
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the program {ended}"
