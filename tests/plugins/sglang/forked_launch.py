"""SGLang's processes as forks of the first: each that is spawned imports again what takes 20 s of processor time.

They are spawned in a run of `asyncrl train` in test_sglang_end_to_end.py.
"""

import multiprocessing
import runpy
import sys
from pathlib import Path
from typing import Any

LAUNCH = Path(__file__).parents[3] / "asyncrl_plugins" / "sglang" / "launch.py"

if __name__ == "__main__":
    set_start_method: Any = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force=force)
    sys.path.insert(0, str(LAUNCH.parent))  # as Python would
    runpy.run_path(str(LAUNCH), run_name="__main__")
