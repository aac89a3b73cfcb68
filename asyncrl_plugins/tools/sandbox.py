"""The `python` tool: each call is a fresh process that is bounded in time, memory, files and output.

It contains accidents, not attackers: an endless loop, a fork bomb, `rmtree("/")`. Where somebody may mean to
break out, run the rollout server in a container. In the process (`sandbox_child.py`):

    system calls   no process can be started, signalled or disturbed, no socket opened, no memory kept that outlives the
                   program, no rights of files changed (a seccomp filter; without it nothing runs)
    files          an empty folder of its own; beside it only Python's own files are read (Landlock, where Linux has it)
    limits         CPU and wall time, address space, size and number of files, environment empty, output cut

What the program shows and whether it failed come back on a pipe of their own, so that nothing printed is taken for it.
The program can reach that pipe: whatever it writes there, or keeps from it, is a mistake of the program.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import itertools
import json
import logging
import os
import signal
import stat
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
from protocol.nesting import read_json

logger = logging.getLogger(__name__)

CHILD = str(Path(__file__).with_name("sandbox_child.py"))
LOOK_S = 0.25
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
    files: int = 2000
    """Most files and folders; looked at every LOOK_S, so that a fast program has some more before it is ended."""
    folder_mib: int = 128
    """Most bytes of them on the disk, together; looked at likewise."""
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
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
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
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        try:
            with open(ours, "rb", buffering=0) as results:
                printed, returned, stopped = await _finished(process, request, results, folder, limits)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    finally:
        await asyncio.to_thread(remove_folder, folder)  # which may take seconds, in which the neighbours go on
    text = printed.decode(errors="replace").replace("\r\n", "\n")
    if len(text) > limits.output_chars:
        known = f"{len(text) - limits.output_chars} characters more"
        if len(printed) == _most_printed(limits):  # what is over that was not kept
            known = f"at least {known}"
        text = f"{text[: limits.output_chars]}\n[{known} are cut]"
    problem, result = _outcome(process.returncode or 0, returned, stopped, limits)
    if problem:
        raise ToolError(f"{text.rstrip()}\n{problem}".strip())
    return [*([text] if text or not result else []), *result]


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
    process: asyncio.subprocess.Process, request: bytes, results: Any, folder: str, limits: SandboxLimits
) -> tuple[bytes, bytes, str]:
    """Printed text, bytes of the results' pipe, and why the program was stopped; empty where it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), results)
    printed, returned = bytearray(), bytearray()
    reads = {
        asyncio.create_task(_read(process.stdout, printed, _most_printed(limits))),
        asyncio.create_task(_read(reader, returned, MAX_RESULT_BYTES)),
    }
    deadline, stopped = loop.time() + limits.seconds, ""
    try:
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(request)
            process.stdin.close()
        while not stopped:
            _, left = await asyncio.wait(reads, timeout=min(LOOK_S, max(0.0, deadline - loop.time())))
            if not left:
                break
            late = f"timed out after {limits.seconds:g} s" if loop.time() >= deadline else ""
            stopped = late or await asyncio.to_thread(_excess, folder, limits)
    finally:
        for read in reads:
            read.cancel()
        transport.close()
    return bytes(printed), bytes(returned), stopped


def _excess(folder: str, limits: SandboxLimits) -> str:
    """Reason why a program has written too much; empty: it has not."""
    folders, files, nbytes = [folder], 0, 0
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files += 1
                    nbytes += 512 * entry.stat(follow_symlinks=False).st_blocks
                    if files > limits.files or nbytes > limits.folder_mib << 20:
                        return f"the program wrote more than {limits.files} files, or {limits.folder_mib} MiB"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return "the program made folders whose paths are too long"
    return ""  # what was removed, or closed, meanwhile is not there


def remove_folder(folder: str) -> None:
    """Remove what a program has left, however much or deep: folders are lifted to the top, so that no path is long."""
    numbers = itertools.count()
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            while names := os.listdir(top):
                for name in names:
                    if not _removed(name, top):
                        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                        try:
                            for other in os.listdir(inner):
                                if not _removed(other, inner):
                                    os.rename(other, f".lifted-{next(numbers)}", src_dir_fd=inner, dst_dir_fd=top)
                        finally:
                            os.close(inner)
        finally:
            os.close(top)
        os.rmdir(folder)
    except OSError as error:
        logger.warning("the folder %s of a program could not be removed: %s", folder, error)


def _removed(name: str, folder: int) -> bool:
    """Remove a file, or a folder with nothing in it. False for another one, which can then be opened and moved."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)
        return True
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        os.chmod(name, 0o700, dir_fd=folder)
        return False
    return True


def _most_printed(limits: SandboxLimits) -> int:
    """Bytes of so many characters, at most four each."""
    return 4 * limits.output_chars


async def _read(stream: asyncio.StreamReader, into: bytearray, most: int) -> None:
    """Read to the end; what is over `most` bytes is thrown away."""
    while chunk := await stream.read(1 << 16):
        into += chunk[: max(0, most - len(into))]


def _outcome(code: int, returned: bytes, stopped: str, limits: SandboxLimits) -> tuple[str, list[bytes]]:
    """Error of a program, empty where it has none, and the images that it shows.

    Raises RuntimeError where its process could not be confined. After the first line, which comes before the program
    runs, the pipe may hold anything.
    """
    first, line, rest = returned.partition(b"\n")
    if line and first != b"confined":
        raise RuntimeError(first.decode(errors="replace"))
    if stopped or code == -signal.SIGXCPU:
        return stopped or f"timed out after {limits.seconds:g} s", []
    try:
        result = read_json(rest)
        shown, error = result["shown"], result["error"]
        if isinstance(error, str) and isinstance(shown, list):
            return error, [base64.b64decode(each, validate=True) for each in shown]
    except (ValueError, KeyError, TypeError):
        pass
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the program {ended}" + (", and what it shows cannot be read" if rest else ""), []
