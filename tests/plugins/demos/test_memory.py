"""Peak memory that the demo of pictures prints."""

from __future__ import annotations

import os
import subprocess
import sys

from asyncrl_plugins.demos.memory import PeakMemory, memory_of_tree

HOLDS = "held = bytearray(b'x') * 2**27; print('held', flush=True); input()"


def test_memory_of_processes_under_this_one_counts() -> None:
    before = memory_of_tree(os.getpid())
    child = subprocess.Popen([sys.executable, "-S", "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == b"held\n"
        with PeakMemory(every_s=60) as memory:
            pass  # looks once at the least
        child.stdin.close()
    assert 0.12 < memory.gib - before < 0.2
