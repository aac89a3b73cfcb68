"""Run a benchmark on the vLLM, torch and transformers that are installed, whatever their versions.

    python -m benchmarks.installed_versions MODULE [ARGUMENT ...]

The vLLM plug-in refuses versions that it was not tested with. On a machine that has others, what works is the result.
"""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import version

from asyncrl_plugins.vllm import rules


def main() -> None:
    found = {package: version(package) for package in rules.VERSIONS}
    print(f"installed {found}, tested {rules.VERSIONS}")
    rules.VERSIONS.update(found)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
