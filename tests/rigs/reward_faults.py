"""A reward file that fails in every way; the first word of the completion chooses how."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

calls = 0
RETURNED = {
    "fine": 1.0,
    "nan": math.nan,
    "inf": -math.inf,
    "huge_int": 10**400,
    "string": "1.0",
    "none": None,
    "true": True,
    "int": 3,
}


def length(sample, scale=1.0):
    return len(sample.completion) * scale


def fault(sample):
    name = sample.completion.split()[0]
    return RETURNED[name] if name in RETURNED else globals()["do_" + name](sample)


def do_raise(sample):
    return {}["missing"]


def do_raise_deep(sample):
    return json.loads("{")


def do_long_message(sample):
    raise ValueError("x" * 100_000)


def do_bad_str(sample):
    class Bad(Exception):
        def __str__(self):
            raise RuntimeError

    raise Bad()


def do_sys_exit(sample):
    sys.exit(3)


def do_sleep(sample):
    time.sleep(1000)


def do_busy(sample):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def do_regex(sample):
    return re.match(r"(a+)+$", "a" * 60 + "b")


def do_numpy(sample):
    import numpy

    return numpy.float32(0.5) > 0


def do_os_exit(sample):
    os._exit(7)


def do_kill9(sample):
    os.kill(os.getpid(), signal.SIGKILL)


def do_segfault(sample):
    ctypes.string_at(0)


def do_stop(sample):
    os.kill(os.getpid(), signal.SIGSTOP)


def do_close_fds(sample):
    os.closerange(3, 100)


def do_memory(sample):
    return len(bytearray(4 << 30))


def do_print(sample):
    print("noise" * 1000)
    os.write(1, b"more noise")
    subprocess.run(["echo", "noise of a child"], check=True)
    return 1.0


def do_flood(sample):
    sys.stderr.write(("noise" * 19 + "loud\n") * 4000)  # 400 kB
    return 1.0


def do_read_stdin(sample):
    return len(sys.stdin.read())


def do_random(sample):
    return random.random()


def do_set_order(sample):
    return float(list({"a", "b", "c", "d"}).index("a"))


def do_count(sample):
    global calls
    calls += 1
    return calls


def do_slow(sample):
    time.sleep(0.3)
    return 1.0


def start_child(sample, **options):
    child = subprocess.Popen(["sleep", "1000"], **options)
    Path(sample.columns["file"]).write_text(f"{child.pid}\n")


def do_leave_child(sample):
    start_child(sample)
    return 1.0


def do_child_and_sleep(sample):
    start_child(sample, start_new_session=True)
    time.sleep(1000)


def do_child_and_exit(sample):
    start_child(sample, start_new_session=True)
    os._exit(1)


def do_fork_returns(sample):
    return float(os.fork() == 0)


def do_die_later(sample):
    threading.Timer(0.1, os._exit, [9]).start()
    return 1.0


def do_see(sample):
    assert sample.messages == [{"role": "user", "content": "q"}], sample.messages
    assert sample.columns == {"level": 3, "parts": [1, None]}, sample.columns
    assert sample.images == [b"png"], sample.images
    assert (sample.prompt, sample.answer, sample.row_id) == ("q", {"x": 1.5}, "d:1")
    assert sample.finish_reason == "length"
    assert sample.completion == "see \ud800", ascii(sample.completion)
    return os.environ["OMP_NUM_THREADS"] == "1"
