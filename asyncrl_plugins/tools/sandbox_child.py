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
# Number of the architecture; system calls that are denied; clone, clone3; fcntl; those that may only name this process.
X86_64 = (
    0xC000003E,
    (
        # start or become a process, watch, signal or disturb one: fork vfork execve execveat ptrace process_vm_readv,
        # _writev pidfd_open pidfd_send_signal pidfd_getfd rt_sigqueueinfo rt_tgsigqueueinfo tkill kcmp migrate_pages
        # move_pages process_madvise process_mrelease setpriority ioprio_set perf_event_open userfaultfd
        *(57, 58, 59, 322, 101, 310, 311, 434, 424, 438, 129, 297, 200, 312, 256, 279, 440, 448, 141, 251, 298, 323),
        # connections, and what other calls can be made through: socket socketpair io_uring_setup bpf
        *(41, 53, 425, 321),
        # memory that stays, or that no limit counts: memfd_create memfd_secret shmget shmat shmctl semget semop semctl
        # semtimedop msgget msgsnd msgrcv msgctl mq_open add_key request_key keyctl
        *(319, 447, 29, 30, 31, 64, 65, 66, 220, 68, 69, 70, 71, 240, 248, 249, 250),
        # rights and times of files, which Landlock lets be: chmod fchmod fchmodat fchmodat2 chown fchown lchown
        # fchownat setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
        # file_setattr utime utimes futimesat utimensat
        *(90, 91, 268, 452, 92, 93, 94, 260, 188, 189, 190, 463, 197, 198, 199, 466, 469, 132, 235, 261, 280),
        # the machine: unshare setns mount umount2 pivot_root chroot open_by_handle_at swapon swapoff reboot
        # settimeofday clock_settime sethostname
        *(272, 308, 165, 166, 155, 161, 304, 167, 168, 169, 164, 227, 170),
    ),
    (56, 435),
    72,
    # kill tgkill prlimit64 setpgid sched_setparam sched_setscheduler sched_setaffinity sched_setattr
    (62, 234, 302, 109, 142, 144, 203, 314),
)
AARCH64 = (
    0xC00000B7,
    (
        *(221, 281, 117, 270, 271, 434, 424, 438, 138, 240, 130, 272, 238, 239, 440, 448, 140, 30, 241, 282),
        *(198, 199, 425, 280),
        *(279, 447, 194, 196, 195, 190, 193, 191, 192, 186, 189, 188, 187, 180, 217, 218, 219),
        *(52, 53, 452, 55, 54, 5, 6, 7, 463, 14, 15, 16, 466, 469, 88),
        *(97, 268, 40, 39, 41, 51, 265, 224, 225, 142, 170, 112, 161),
    ),
    (220, 435),
    25,
    (129, 131, 261, 154, 118, 119, 122, 274),
)
OWNER_COMMANDS = (8, 10, 15, 1024, 1026)
"""Commands of fcntl that make the kernel signal whoever they name, when a file changes: F_SETOWN, F_SETSIG,
F_SETOWN_EX, F_SETLEASE, F_NOTIFY."""
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
SCOPES = 0b11
"""Abstract Unix sockets and signals: neither reaches a process outside."""
CONFINED = "confined"
READ, FILE_RIGHTS = 0b1101, 0b111 | 1 << 14
"""Execute, read a file, read a folder; and the rights that a single file can have."""
READABLE = ("/usr", "/lib", "/lib64", "/etc/localtime", "/proc/cpuinfo", "/sys/devices/system/cpu")
WRITABLE = ("/dev/null", "/dev/zero", "/dev/urandom")


def main() -> None:
    out = os.fdopen(int(sys.argv[1]), "w", buffering=1, encoding="utf-8")
    request = json.load(sys.stdin)
    shown: list[str] = []
    try:
        images = _images(request["images"])
        _limit(request["limits"])
        _restrict_files(os.getcwd())
        _filter_system_calls()
    except OSError as error:
        print(f"the process cannot be confined ({error})", file=out)
        return
    print(CONFINED, file=out)  # the program can write there, too: only what comes before it is ours

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
    handled = struct.pack("QQQ", rights, 0b11, SCOPES) if version >= 6 else struct.pack("Q", rights)  # no TCP either
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
    """A seccomp filter: what reaches beyond this process, or outlives it, fails with EPERM. Threads may be made."""
    tables = {"x86_64": X86_64, "aarch64": AARCH64}
    if platform.machine() not in tables:
        raise OSError(errno.ENOSYS, f"no filter of system calls is written for {platform.machine()}")
    program = filter_program(tables[platform.machine()], os.getpid())
    packed = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    filter = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter, 0, 0))


def filter_program(table: tuple, process: int) -> list[tuple[int, int, int, int]]:  # type: ignore[type-arg]
    """Steps of classic BPF (code, jump if true, jump if false, operand) for a process of one of the tables above."""
    architecture, denied, (clone, clone3), fcntl, own_only = table
    refuse = (RETURN, 0, 0, DENY | errno.EPERM)
    program = [(LOAD, 0, 0, ARCHITECTURE_AT), (JUMP_EQUAL, 1, 0, architecture), refuse, (LOAD, 0, 0, NUMBER_AT)]
    program += [(JUMP_AT_LEAST, 0, 1, 0x40000000), refuse]  # x32
    for number in denied:
        program += [(JUMP_EQUAL, 0, 1, number), refuse]
    program += [(JUMP_EQUAL, 0, 1, clone3), (RETURN, 0, 0, DENY | errno.ENOSYS)]  # the C library then uses clone
    program += [(JUMP_EQUAL, 0, 4, clone), (LOAD, 0, 0, ARGUMENT_AT), (JUMP_ANY_BIT, 1, 0, CLONE_THREAD), refuse]
    program += [(RETURN, 0, 0, ALLOW)]
    commands = len(OWNER_COMMANDS)
    program += [(JUMP_EQUAL, 0, commands + 3, fcntl), (LOAD, 0, 0, ARGUMENT_AT + 8)]
    program += [(JUMP_EQUAL, commands - place, 0, command) for place, command in enumerate(OWNER_COMMANDS)]
    program += [(RETURN, 0, 0, ALLOW), refuse]
    for number in own_only:  # 0 is this process, too
        program += [(JUMP_EQUAL, 0, 5, number), (LOAD, 0, 0, ARGUMENT_AT), (JUMP_EQUAL, 2, 0, 0)]
        program += [(JUMP_EQUAL, 1, 0, process), refuse, (RETURN, 0, 0, ALLOW)]
    return [*program, (RETURN, 0, 0, ALLOW)]


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


if __name__ == "__main__":
    main()
