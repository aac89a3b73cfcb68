"""The filter of system calls of the `python` tool, computed step by step for both architectures.

Numbers are those of Debian's linux-libc-dev 6.1.192-3 and linux-libc-dev-arm64-cross 6.1.4; of later calls (fchmodat2,
setxattrat, removexattrat, file_setattr), which have one number everywhere, those of Linux's own table.
"""

from __future__ import annotations

import errno
from functools import cache

import pytest

from asyncrl_plugins.tools import sandbox_child

DENIED = """
fork:57:- vfork:58:- execve:59:221 execveat:322:281 ptrace:101:117 process_vm_readv:310:270
process_vm_writev:311:271 pidfd_open:434:434 pidfd_send_signal:424:424 pidfd_getfd:438:438 rt_sigqueueinfo:129:138
rt_tgsigqueueinfo:297:240 tkill:200:130 kcmp:312:272 migrate_pages:256:238 move_pages:279:239
process_madvise:440:440 process_mrelease:448:448 setpriority:141:140 ioprio_set:251:30 perf_event_open:298:241
userfaultfd:323:282 socket:41:198 socketpair:53:199 io_uring_setup:425:425 bpf:321:280 memfd_create:319:279
memfd_secret:447:447 shmget:29:194 shmat:30:196 shmctl:31:195 semget:64:190 semop:65:193 semctl:66:191
semtimedop:220:192 msgget:68:186 msgsnd:69:189 msgrcv:70:188 msgctl:71:187 mq_open:240:180 add_key:248:217
request_key:249:218 keyctl:250:219 chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55
lchown:94:- fchownat:260:54 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 setxattrat:463:463 removexattr:197:14
lremovexattr:198:15 fremovexattr:199:16 removexattrat:466:466 file_setattr:469:469 utime:132:- utimes:235:-
futimesat:261:- utimensat:280:88 unshare:272:97 setns:308:268 mount:165:40 umount2:166:39 pivot_root:155:41
chroot:161:51 open_by_handle_at:304:265 swapon:167:224 swapoff:168:225 reboot:169:142 settimeofday:164:170
clock_settime:227:112 sethostname:170:161
"""
"""Name, number on x86-64, and number on ARM64, which has no older form of some."""
OWN_ONLY = """
kill:62:129 tgkill:234:131 prlimit64:302:261 setpgid:109:154 sched_setparam:142:118 sched_setscheduler:144:119
sched_setaffinity:203:122 sched_setattr:314:274
"""
OTHERS = """
clone:56:220 clone3:435:435 fcntl:72:25 read:0:63 write:1:64 openat:257:56 mmap:9:222 futex:202:98
rt_sigaction:13:134 exit_group:231:94 getpid:39:172 sched_getaffinity:204:123 fchdir:81:50
"""
TABLES = {"x86_64": (sandbox_child.X86_64, 0xC000003E, 1), "aarch64": (sandbox_child.AARCH64, 0xC00000B7, 2)}
"""With the number of the architecture in linux/audit.h, and where its numbers stand above."""
PROCESS, OTHER = 4321, 99
ALLOWED, ABSENT = 0, errno.ENOSYS
REFUSED = errno.EPERM


def numbers(names: str, place: int) -> dict[str, int]:
    """Numbers by name of one architecture, for those that it has."""
    rows = [row.split(":") for row in names.split()]
    return {row[0]: int(row[place]) for row in rows if row[place] != "-"}


@cache
def filter_of(machine: str) -> list[tuple[int, int, int, int]]:
    return sandbox_child.filter_program(TABLES[machine][0], PROCESS)


def result(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Error of a system call by the filter, 0 for none: classic BPF over `struct seccomp_data`, by its definition."""
    own = TABLES[machine][1]
    data = number.to_bytes(4, "little") + (architecture or own).to_bytes(4, "little") + bytes(8)
    data += b"".join(argument.to_bytes(8, "little", signed=True) for argument in (*arguments, *[0] * 6)[:6])
    program, at, held = filter_of(machine), 0, 0
    while True:
        code, yes, no, operand = program[at]
        assert max(yes, no) < 256, "an unsigned byte"
        if code == 0x06:  # BPF_RET | BPF_K
            assert operand >> 16 in (0x7FFF, 0x5), "SECCOMP_RET_ALLOW or SECCOMP_RET_ERRNO"
            return operand & 0xFFFF
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            held = int.from_bytes(data[operand : operand + 4], "little")
            at += 1
            continue
        holds = {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}[code]  # JEQ, JGE, JSET
        at += 1 + (yes if holds else no)


@pytest.mark.parametrize("machine", TABLES)
def test_each_call_is_denied_by_its_number_and_no_other_is(machine: str) -> None:
    place = TABLES[machine][2]
    denied, own_only, others = (numbers(names, place) for names in (DENIED, OWN_ONLY, OTHERS))
    assert {name for name, number in denied.items() if result(machine, number) != REFUSED} == set()
    watched = {*denied.values(), *own_only.values(), others["clone"], others["clone3"], others["fcntl"]}
    assert {number for number in range(600) if result(machine, number, OTHER) != ALLOWED} <= watched
    assert {result(machine, others[name]) for name in others if name not in ("clone", "clone3")} == {ALLOWED}
    assert result(machine, others["read"], architecture=0x40000003) == REFUSED, "i386"
    assert result(machine, 0x40000000 | others["read"]) == REFUSED, "x32"


@pytest.mark.parametrize("machine", TABLES)
def test_calls_that_name_a_process_may_name_this_one(machine: str) -> None:
    own_only = numbers(OWN_ONLY, TABLES[machine][2])
    for named, expected in ((0, ALLOWED), (PROCESS, ALLOWED), (OTHER, REFUSED), (-1, REFUSED), (-PROCESS, REFUSED)):
        assert {result(machine, number, named) for number in own_only.values()} == {expected}, named


@pytest.mark.parametrize("machine", TABLES)
def test_threads_are_made_and_owners_of_files_are_not_set(machine: str) -> None:
    """Flags of pthread_create, fork and vfork; F_DUPFD to F_SETLK are 0 to 6."""
    others = numbers(OTHERS, TABLES[machine][2])
    made = [result(machine, others["clone"], flags) for flags in (0x3D0F00, 0x01200011, 0x4111)]
    assert made == [ALLOWED, REFUSED, REFUSED]
    assert result(machine, others["clone3"]) == ABSENT, "so that the C library uses clone"
    denied = {command for command in range(2000) if result(machine, others["fcntl"], 1, command)}
    assert denied == {8, 10, 15, 1024, 1026}
