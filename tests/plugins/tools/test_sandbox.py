"""The `python` tool contains accidents: what becomes of each program is the table here."""

from __future__ import annotations

import asyncio
import ctypes
import io
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from asyncrl.environments.interface import Start, ToolError, png_bytes
from asyncrl.errors import UserError
from asyncrl_plugins.tools import sandbox
from asyncrl_plugins.tools.environment import ShownImage, ToolContext
from asyncrl_plugins.tools.sandbox import SandboxLimits, python, run_python
from asyncrl_plugins.tools.schema import tool_of

SECRET = Path(__file__).parents[3] / "pyproject.toml"
RED = png_bytes(Image.new("RGB", (8, 4), "red"))
PROGRAMS: dict[str, tuple[str, str | list[Any]]] = {
    "right result": ("print(sum(range(5)))", ["10\n"]),
    "nothing": ("x = 1", [""]),
    "text and exit": ("import sys\nprint('a')\nsys.exit()", ["a\n"]),
    "threads": ("import threading as t\nr = t.Thread(target=print, args=(4,))\nr.start(); r.join()", ["4\n"]),
    "own files": ("open('a', 'w').write('x')\nimport os; print(os.listdir())", ["['a']\n"]),
    "exception": (
        "def f():\n    return 1 / 0\nprint('before')\nf()",
        "before\nTraceback.*line 2, in f\n    return 1 / 0",
    ),
    "syntax": ("print(", "SyntaxError: '\\(' was never closed"),
    "endless loop": ("while True: pass", "timed out after 3 s"),
    "sleep": ("print('x', flush=True)\nimport time; time.sleep(60)", "x\ntimed out after 3 s"),
    "2 GB": ("bytearray(2 << 30)", "MemoryError"),
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "subprocess": ("import subprocess; subprocess.run(['true'])", "PermissionError"),
    "child that stays": ("import os\nif os.fork() == 0:\n    import time; time.sleep(60)", "PermissionError"),
    "socket": ("import socket; socket.socket()", "PermissionError"),
    "1 GB file": ("with open('f', 'wb') as f:\n  for _ in range(1024): f.write(bytes(1 << 20))", "File too large"),
    "100 MB printed": (
        "for _ in range(1000): print('x' * 100_000)",
        [f"{'x' * 4000}\n[at least 12000 characters more are cut]"],
    ),
    "kills its parent": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "environment": ("import os; print('API_KEY' in os.environ)", ["False\n"]),
    "image in and out": ("show(images[0].rotate(90, expand=True)); print(images[0].size)", ["(8, 4)\n", (4, 8)]),
    "exit code": ("import os; os._exit(3)", "the program ended with exit code 3"),
    "closes all files": (
        "import os; os.closerange(3, 4096)",
        "exit code",
    ),
}
LANDLOCK = {
    "reads of the run": (f"print(open({str(SECRET)!r}).read())", "PermissionError"),
    "reads of the machine": ("print(open('/etc/passwd').read())", "PermissionError"),
    "writes elsewhere": (f"open({str(SECRET) + '.new'!r}, 'w')", "PermissionError"),
}


def has_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


def test_what_becomes_of_each_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")

    async def run() -> dict[str, list[Any] | str]:
        at_once = asyncio.Semaphore(3)

        async def one(name: str, code: str) -> list[Any] | str:
            limits = SandboxLimits(seconds=3.0 if name in ("endless loop", "sleep") else 60.0)
            async with at_once:
                try:
                    return await run_python(code, [RED], limits)
                except ToolError as error:
                    return str(error)

        found = await asyncio.gather(*(one(name, code) for name, (code, _) in programs.items()))
        return dict(zip(programs, found, strict=True))

    programs = PROGRAMS | (LANDLOCK if has_landlock() else {})
    before, files = set(psutil.Process().children(recursive=True)), set(SECRET.parent.iterdir())
    found = asyncio.run(run())
    for name, (_, expected) in programs.items():
        if isinstance(expected, str):
            assert isinstance(found[name], str), (name, found[name])
            assert _matches(expected, found[name]), (name, found[name])
        else:
            assert _shown(found[name]) == expected, (name, found[name])
    assert set(psutil.Process().children(recursive=True)) == before, "nothing of a program stays behind"
    assert set(SECRET.parent.iterdir()) == files


def _matches(expected: str, found: Any) -> bool:
    return re.search(expected, found, re.DOTALL) is not None


def _shown(parts: Any) -> list[Any]:
    return [Image.open(io.BytesIO(part)).size if isinstance(part, bytes) else part for part in parts]


def test_the_tool_sees_the_images_of_the_trajectory() -> None:
    tool = tool_of(python)
    assert list(tool.parameters["properties"]) == ["code"]
    context = ToolContext(Start(), [ShownImage(RED)])
    assert asyncio.run(python("print(len(images))", ctx=context)) == ["1\n"]


def test_a_machine_that_cannot_confine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(Path(sandbox.CHILD).read_text().replace("platform.machine()", "'sparc'"))
    monkeypatch.setattr(sandbox, "CHILD", str(child))
    with pytest.raises(UserError, match=r"`python` cannot run here: .*no filter of system calls is written for sparc"):
        asyncio.run(sandbox.check_sandbox({}))
