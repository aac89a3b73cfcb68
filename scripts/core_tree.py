"""Lay out the project without its plug-ins, and install the wheel that is built from it.

    python scripts/core_tree.py build/core

The folder gets the files that git tracks, less `asyncrl_plugins` with its tests and entry points. Its `.venv` has that
wheel, and reads every other package from the environment that runs this script. The core's tests run there:

    cd build/core && .venv/bin/python -m pytest tests/unit tests/system
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
PLUGINS = ("asyncrl_plugins", "tests/plugins")
ENTRY_POINTS = re.compile(r'^\[project\.entry-points\."asyncrl\.\w+"\]\n(?:[^\[\n].*\n|\n)*', re.MULTILINE)


def without_plugins(pyproject: str) -> str:
    """Text of a pyproject.toml whose wheel has no plug-ins."""
    text = ENTRY_POINTS.sub("", pyproject)
    return re.sub(r'^"asyncrl_plugins.*\n', "", text.replace('"asyncrl_plugins*", ', ""), flags=re.MULTILINE)


def lay_out(target: Path) -> None:
    """Copy the tracked files of the core, as they are in the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in listed.decode().split("\0"):
        source = (ROOT / name).resolve()  # of a link, too
        if not name or not source.exists() or source.relative_to(ROOT).as_posix().startswith(PLUGINS):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    (target / "pyproject.toml").write_text(without_plugins((ROOT / "pyproject.toml").read_text()))


def install(wheel: Path, environment: Path) -> None:
    """Make an environment that has the wheel and, from this one, everything but the checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # The .pth files of these folders are not read: one of them makes this checkout importable.
    folders = [folder for folder in sys.path if folder.endswith("site-packages")]
    packages.joinpath("dependencies.pth").write_text("\n".join([*folders, "import _asyncrl_torchvision_cpu", ""]))
    as_made = ["--ignore-installed", "--no-index", "--no-deps", "--no-compile"]
    python = environment / "bin" / "python"
    subprocess.run([*PIP, f"--python={python}", "install", *as_made, str(wheel)], check=True)


def main(target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    lay_out(target)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    subprocess.run([*PIP, *build], cwd=target, check=True)
    shutil.rmtree(target / "build", ignore_errors=True)
    (wheel,) = (target / "dist").glob("asyncrl-*.whl")
    install(wheel, target / ".venv")
    print(f"{target}: the core alone, and its wheel in {target / '.venv'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
