"""Lay out the project with one plug-in or none, and install the wheel that is built from it.

    python scripts/core_tree.py build/core
    python scripts/core_tree.py build/judges --plugin judges

The folder gets the files that git tracks, less the other plug-ins with their tests and entry points. Its `.venv` has
that wheel, and reads every other package from the environment that runs this script. Tests run there:

    cd build/core && .venv/bin/python -m pytest tests/unit tests/system tests/gpu
    cd build/judges && .venv/bin/python -m pytest tests/plugins/judges
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
PACKAGE, TESTS, TOGETHER = "asyncrl_plugins/", "tests/plugins/", "tests/together/"
ENTRY_POINTS = re.compile(r'^\[project\.entry-points\."asyncrl\.\w+"\]\n(?:[^\[\n].*\n|\n)*', re.MULTILINE)
OTHER_ENVIRONMENTS = (".venv-sglang", ".venv/verifiers")
"""Environments of engines and adapters that cannot share ours, where they are installed."""


def is_copied(name: str, plugin: str) -> bool:
    """Return whether the tree has the file of this name, relative to the root."""
    if name.startswith((PACKAGE, TESTS)):
        own = name in (f"{PACKAGE}__init__.py", f"{TESTS}__init__.py")
        return bool(plugin) and (own or name.startswith((f"{PACKAGE}{plugin}/", f"{TESTS}{plugin}/")))
    return not name.startswith(TOGETHER)


def with_plugin(pyproject: str, plugin: str) -> str:
    """Text of a pyproject.toml whose wheel has this plug-in alone; the empty name stands for none."""

    def own_entries(section: re.Match[str]) -> str:
        head, *entries = section[0].splitlines()
        own = [entry for entry in entries if f'"asyncrl_plugins.{plugin}.' in entry]
        return "\n".join([head, *own, "", ""]) if own else ""

    text = ENTRY_POINTS.sub(own_entries, pyproject)
    data = re.compile(r'^"asyncrl_plugins\.(\w+)[\w.]*" = .*\n', re.MULTILINE)
    text = data.sub(lambda line: line[0] if line[1] == plugin else "", text)
    return text if plugin else text.replace('"asyncrl_plugins*", ', "")


def lay_out(target: Path, plugin: str) -> None:
    """Copy the tracked files of the core and the plug-in, as they are in the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in listed.decode().split("\0"):
        source = (ROOT / name).resolve()  # of a link, too
        if not name or not source.exists():
            continue
        if not is_copied(name, plugin) or not is_copied(source.relative_to(ROOT).as_posix(), plugin):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    (target / "pyproject.toml").write_text(
        with_plugin((ROOT / "pyproject.toml").read_text(encoding="utf-8"), plugin), encoding="utf-8"
    )


def install(wheel: Path, environment: Path) -> None:
    """Make an environment that has the wheel and, from this one, everything but the checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # The .pth files of these folders are not read: one of them makes this checkout importable.
    folders = [folder for folder in sys.path if folder.endswith("site-packages")]
    packages.joinpath("dependencies.pth").write_text(
        "\n".join([*folders, "import _asyncrl_torchvision_cpu", ""]), encoding="utf-8"
    )
    as_made = ["--ignore-installed", "--no-index", "--no-deps", "--no-compile"]
    python = environment / "bin" / "python"
    subprocess.run([*PIP, f"--python={python}", "install", *as_made, str(wheel)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="lay out the project with one plug-in or none, and install its wheel")
    parser.add_argument("target", type=Path, help="folder that is written anew")
    names = sorted(folder.parent.name for folder in (ROOT / PACKAGE).glob("*/__init__.py"))
    parser.add_argument("--plugin", choices=names, default="", help="plug-in beside the core, e.g. judges")
    arguments = parser.parse_args()
    target, plugin = arguments.target.absolute(), arguments.plugin
    if target.exists():
        shutil.rmtree(target)
    lay_out(target, plugin)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    subprocess.run([*PIP, *build], cwd=target, check=True)
    shutil.rmtree(target / "build", ignore_errors=True)
    (wheel,) = (target / "dist").glob("asyncrl-*.whl")
    install(wheel, target / ".venv")
    for name in OTHER_ENVIRONMENTS if plugin else ():
        if (ROOT / name).exists():
            (target / name).symlink_to((ROOT / name).resolve())
    print(f"{target}: the core {f'and {plugin}' if plugin else 'alone'}, and its wheel in {target / '.venv'}")


if __name__ == "__main__":
    main()
