"""Inside the process of one call of the `python` tool: confine it, run the program, report. Imports nothing of ours.

Started by `sandbox.py` as `python -I -B sandbox_child.py FD`: a JSON request from stdin, a JSON result to FD.
Linux's own documents: seccomp(2), prctl(2), landlock(7).
"""

from __future__ import annotations

import base64
import ctypes
import errno
import io
import json
import linecache
import os
import platform
import resource
import struct
import sys
import traceback

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, DENY = 0x7FFF0000, 0x00050000
CLONE_THREAD = 0x00010000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
# Number of the architecture; system calls that are denied; clone, clone3; those that may only name this process.
X86_64 = (
    0xC000003E,
    # fork vfork execve execveat socket socketpair ptrace unshare setns io_uring_setup process_vm_readv, _writev
    # pidfd_send_signal pidfd_open rt_sigqueueinfo rt_tgsigqueueinfo tkill mount bpf
    (57, 58, 59, 322, 41, 53, 101, 272, 308, 425, 310, 311, 424, 434, 129, 297, 200, 165, 321),
    (56, 435),
    (62, 234),  # kill tgkill
)
AARCH64 = (
    0xC00000B7,
    (221, 281, 198, 199, 117, 97, 268, 425, 270, 271, 424, 434, 138, 240, 130, 40, 280),
    (220, 435),
    (129, 131),
)
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ, FILE_RIGHTS = 0b1101, 0b111 | 1 << 14
"""Execute, read a file, read a folder; and the rights that a single file can have."""
READABLE = ("/usr", "/lib", "/lib64", "/etc/localtime", "/proc/cpuinfo", "/sys/devices/system/cpu")
WRITABLE = ("/dev/null", "/dev/zero", "/dev/urandom")


def main() -> None:
    out = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    request = json.load(sys.stdin)
    shown: list[str] = []
    try:
        images = _images(request["images"])
        _limit(request["limits"])
        _restrict_files(os.getcwd())
        _filter_system_calls()
    except OSError as error:
        json.dump({"unconfined": f"the process cannot be confined ({error})"}, out)
        return

    def show(image) -> None:  # type: ignore[no-untyped-def]
        """Show an image: PIL's, encoded bytes, an array, or a figure of matplotlib."""
        shown.append(base64.b64encode(_encoded(image)).decode())

    error = _run(request["code"], {"images": images, "show": show, "__name__": "__main__"})
    sys.stdout.flush()
    json.dump({"shown": shown, "error": error}, out)
    out.flush()
    os._exit(0)  # no exit handler or thread of the program


def _run(code: str, names: dict) -> str:  # type: ignore[type-arg]
    """Error of the program; empty without one."""
    linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")
    try:
        exec(compile(code, "<code>", "exec", dont_inherit=True), names)
    except SystemExit as ended:
        return "" if not ended.code else f"the program ended with exit code {ended.code}"
    except BaseException as error:
        kept = error.__traceback__ and error.__traceback__.tb_next  # without our own frame
        return "".join(traceback.format_exception(type(error), error, kept, limit=-4)).strip()[-2000:]
    return ""


def _images(encoded: list[str]) -> list:  # type: ignore[type-arg]
    if not encoded:
        return []
    from PIL import Image

    return [Image.open(io.BytesIO(base64.b64decode(each))).convert("RGB") for each in encoded]


def _encoded(image) -> bytes:  # type: ignore[no-untyped-def]
    if isinstance(image, bytes):
        return image
    buffer = io.BytesIO()
    if hasattr(image, "savefig"):
        image.savefig(buffer, format="png")
        return buffer.getvalue()
    if not hasattr(image, "save"):
        from PIL import Image

        image = Image.fromarray(image)
    image.convert("RGB").save(buffer, format="PNG")
    return buffer.getvalue()


def _limit(limits: dict) -> None:  # type: ignore[type-arg]
    memory, file = limits["memory_mib"] << 20, limits["file_mib"] << 20
    seconds = int(limits["seconds"]) + 1
    wanted = ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, file), (resource.RLIMIT_CPU, seconds))
    for name, value in (*wanted, (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64)):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _restrict_files(folder: str) -> None:
    """Landlock: everything in the folder, Python's own files to read. Nothing, where this Linux has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    rights = (1 << (13 if version == 1 else 14 if version == 2 else 15)) - 1
    handled = struct.pack("Q", rights)
    rules = _checked(libc.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0))
    readable = {*sys.path, sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *READABLE}
    allowed = [(path, READ) for path in readable] + [(path, rights & FILE_RIGHTS) for path in WRITABLE]
    for path, right in [*allowed, (folder, rights)]:
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        right &= rights if os.path.isdir(path) else FILE_RIGHTS
        rule = struct.pack("=Qi", right, place)
        _checked(libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0))
        os.close(place)
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def _filter_system_calls() -> None:
    """A seccomp filter: what starts or signals a process, or opens a socket, fails with EPERM. Threads may be made."""
    tables = {"x86_64": X86_64, "aarch64": AARCH64}
    if platform.machine() not in tables:
        raise OSError(errno.ENOSYS, f"no filter of system calls is written for {platform.machine()}")
    architecture, denied, (clone, clone3), own_only = tables[platform.machine()]
    refuse = (RETURN, 0, 0, DENY | errno.EPERM)
    program = [(LOAD, 0, 0, ARCHITECTURE_AT), (JUMP_EQUAL, 1, 0, architecture), refuse, (LOAD, 0, 0, NUMBER_AT)]
    program += [(JUMP_AT_LEAST, 0, 1, 0x40000000), refuse]  # x32
    for number in denied:
        program += [(JUMP_EQUAL, 0, 1, number), refuse]
    program += [(JUMP_EQUAL, 0, 1, clone3), (RETURN, 0, 0, DENY | errno.ENOSYS)]  # the C library then uses clone
    program += [(JUMP_EQUAL, 0, 4, clone), (LOAD, 0, 0, ARGUMENT_AT), (JUMP_ANY_BIT, 1, 0, CLONE_THREAD), refuse]
    program += [(RETURN, 0, 0, ALLOW)]
    for number in own_only:
        program += [(JUMP_EQUAL, 0, 4, number), (LOAD, 0, 0, ARGUMENT_AT), (JUMP_EQUAL, 1, 0, os.getpid()), refuse]
        program += [(RETURN, 0, 0, ALLOW)]
    program += [(RETURN, 0, 0, ALLOW)]
    packed = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    filter = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter, 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


if __name__ == "__main__":
    main()
