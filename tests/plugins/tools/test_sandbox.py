"""The `python` tool contains accidents: what becomes of each program is the table here."""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import re
import tempfile
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
REACHES_OUT = """
import ctypes, fcntl, os, resource
libc = ctypes.CDLL(None, use_errno=True)
parent, here = os.getppid(), ctypes.create_string_buffer(b"user.a")
def call(name, *arguments):
    ctypes.set_errno(0)
    if getattr(libc, name)(*arguments) != -1:
        return
    raise OSError(ctypes.get_errno(), name)
tries = {
    "prlimit": lambda: resource.prlimit(parent, resource.RLIMIT_CPU, (1, 1)),
    "F_SETOWN": lambda: fcntl.fcntl(1, fcntl.F_SETOWN, parent),
    "F_SETSIG": lambda: fcntl.fcntl(1, fcntl.F_SETSIG, 9),
    "F_SETOWN_EX": lambda: fcntl.fcntl(1, 15, (1).to_bytes(4, "little") + parent.to_bytes(4, "little")),
    "F_NOTIFY": lambda: fcntl.fcntl(os.open(".", 0), fcntl.F_NOTIFY, fcntl.DN_CREATE),
    "setpriority": lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
    "setpriority of all": lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
    "affinity": lambda: os.sched_setaffinity(parent, {0}),
    "scheduler": lambda: os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0)),
    "setpgid": lambda: os.setpgid(parent, 0),
    "kill of all": lambda: os.kill(-1, 0),
    "kill of a group": lambda: os.killpg(os.getpgid(parent), 0),
    "pidfd": lambda: os.pidfd_open(parent),
    "shmget": lambda: call("shmget", 0, 1 << 20, 0o1600),
    "semget": lambda: call("semget", 0, 1, 0o1600),
    "msgget": lambda: call("msgget", 0, 0o1600),
    "mq_open": lambda: call("mq_open", b"/a", 0o102, 0o600, None),
    "memfd": lambda: os.memfd_create("a"),
    "chmod": lambda: os.chmod("/usr", 0o755),
    "chown": lambda: os.chown("/usr", 0, 0),
    "utime": lambda: os.utime("/usr"),
    "setxattr": lambda: os.setxattr(".", "user.a", b""),
    "chroot": lambda: os.chroot("."),
    "unshare": lambda: call("unshare", 0x10000000),
}
for name, attempt in tries.items():
    try:
        attempt()
        print(name, "worked")
    except PermissionError as error:
        assert error.errno == 1, (name, error)
    except OSError as error:
        print(name, error)
resource.getrlimit(resource.RLIMIT_AS), resource.setrlimit(resource.RLIMIT_CPU, (5, 5)), os.kill(os.getpid(), 0)
print(os.sched_setaffinity(0, os.sched_getaffinity(0)), fcntl.fcntl(1, fcntl.F_GETFL) & 3)
"""
"""What is denied is silent; at the end stands what a program may do to itself."""
FORGED = "import os, sys\nos.write(int(sys.argv[1]), {!r})\nos._exit(0)"
PROGRAMS |= {
    "reaches out": (REACHES_OUT, ["None 1\n"]),
    "a forged refusal": (FORGED.format(b'{"unconfined": "no"}\n'), "exit code 0, and what it shows cannot be read"),
    "150,000 files": ("for i in range(150_000): open(str(i), 'w').close()", "more than 2000 files"),
    "1 GB in files": ("for i in range(1024): open(str(i), 'wb').write(bytes(1 << 20))", "or 16 MiB"),
    "4,000 folders": (
        "import os, time\nfor _ in range(4000):\n    os.mkdir('aa')\n    os.chdir('aa')\ntime.sleep(9)",
        "paths are too long|more than 2000 files",
    ),
}
LANDLOCK = {
    "reads of the run": (f"print(open({str(SECRET)!r}).read())", "PermissionError"),
    "reads of the machine": ("print(open('/etc/passwd').read())", "PermissionError"),
    "writes elsewhere": (f"open({str(SECRET) + '.new'!r}, 'w')", "PermissionError"),
}


def has_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


def test_what_becomes_of_each_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("API_KEY", "secret")

    async def run() -> dict[str, list[Any] | str]:
        at_once = asyncio.Semaphore(3)

        async def one(name: str, code: str) -> list[Any] | str:
            limits = SandboxLimits(seconds=3.0 if name in ("endless loop", "sleep") else 60.0, folder_mib=16)
            async with at_once:
                try:
                    return await run_python(code, [RED], limits)
                except ToolError as error:
                    return str(error)

        found = await asyncio.gather(*(one(name, code) for name, (code, _) in programs.items()))
        return dict(zip(programs, found, strict=True))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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
    assert list(tmp_path.iterdir()) == [], "no folder of a program stays behind"


@pytest.mark.parametrize(
    "returned",
    [
        b"",
        b"confined",
        b"confined\n",
        b"confined\n{}",
        b"confined\n[1]",
        b'confined\n{"unconfined": "no"}',
        b'confined\n{"shown": 5, "error": ""}',
        b'confined\n{"shown": [5], "error": ""}',
        b'confined\n{"shown": ["!"], "error": ""}',
        b'confined\n{"shown": [], "error": 5}',
        b"confined\n" + b"[" * 100_000,
        b'confined\n{"shown": ' + b"[" * 100 + b"]" * 100 + b', "error": ""}',
        b'confined\n{"shown": [], "error": ""}{"shown": [], "error": ""}',
        b"confined\n\xff\xfe",
    ],
)
def test_a_result_that_cannot_be_read_is_the_programs_mistake(returned: bytes) -> None:
    """A failure of the environment would be counted, and enough of them end the run."""
    problem, shown = sandbox._outcome(0, returned, "", SandboxLimits())
    assert problem.startswith("the program ended with exit code 0")
    assert shown == []


def test_only_what_comes_before_the_program_says_that_it_is_not_confined() -> None:
    assert sandbox._outcome(0, b'confined\n{"shown": ["aGk="], "error": "no"}', "", SandboxLimits()) == ("no", [b"hi"])
    with pytest.raises(RuntimeError, match="cannot be confined"):
        sandbox._outcome(0, b"the process cannot be confined (x)\n", "", SandboxLimits())


def test_a_folder_is_removed_however_deep_and_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, here = tmp_path / "sandbox", os.getcwd()
    folder.mkdir()
    (folder / "link").symlink_to(SECRET.parent)
    os.mkfifo(folder / "pipe")
    try:
        os.chdir(folder)
        for number in range(2000):
            os.mkdir("deep", 0o700 if number % 2 else 0o300)
            os.chdir("deep")
            Path("file").touch()
    finally:
        os.chdir(here)
    sandbox.remove_folder(str(folder))
    assert (list(tmp_path.iterdir()), caplog.records) == ([], [])
    sandbox.remove_folder(str(folder))
    assert "could not be removed" in caplog.text
    assert SECRET.exists()


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
