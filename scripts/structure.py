"""Print the size and shape of the code: lines and files per room, small files, import chains and cycles.

    python scripts/structure.py [ROOT]

A room is a folder below a package; a file directly in a package is a room of its own. Imports are those between files
of the four packages, as `from a.b import c` says them, those for type checkers included.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGES = ("asyncrl", "learner", "rollout_server", "protocol")
SMALL = 45
"""Lines. A file below it that is no `__init__` or `__main__` is counted as small."""


def module_name(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def import_graph(root: Path) -> dict[str, set[str]]:
    """Modules of the packages, and the modules that each imports."""
    files = {module_name(f): f for p in PACKAGES for f in (x.relative_to(root) for x in (root / p).rglob("*.py"))}
    return {name: set(_imports(root / file, files)) - {name} for name, file in files.items()}


def _imports(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (name for name in (full if full in known else node.module,) if name in known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""

    @cache
    def reachable(name: str) -> frozenset[str]:
        seen, todo = set(), list(graph[name])
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += graph[other]
        return frozenset(seen)

    looped = [name for name in graph if name in reachable(name)]
    groups = {frozenset(o for o in looped if o in reachable(name) and name in reachable(o)) for name in looped}
    return sorted(sorted(group) for group in groups)


def rooms(graph: Mapping[str, set[str]], root: Path) -> dict[str, set[str]]:
    """Rooms, and the rooms that each imports."""

    def room(module: str) -> str:
        parent = module.rpartition(".")[0]
        return module if (root / module.replace(".", "/")).is_dir() or "." not in parent else parent

    between: dict[str, set[str]] = {room(name): set() for name in graph}
    for name, others in graph.items():
        between[room(name)] |= {room(other) for other in others} - {room(name)}
    return between


def longest_chain(graph: Mapping[str, set[str]], package: str) -> list[str]:
    """The longest path of imports within a package, cycles cut where they close."""
    inside = {n: {o for o in others if o.startswith(package)} for n, others in graph.items() if n.startswith(package)}

    def chain(name: str, above: tuple[str, ...]) -> list[str]:
        if name not in known or any(o in above for o in inside[name]):
            below = [chain(o, (*above, name)) for o in sorted(inside[name]) if o not in (*above, name)]
            known[name] = [name, *max(below, key=len, default=[])]
        return known[name]

    known: dict[str, list[str]] = {}
    return max((chain(name, ()) for name in inside), key=len)


def main(root: Path) -> None:
    lines: dict[str, list[int]] = defaultdict(list)
    for package in (*PACKAGES, "tests"):
        for file in sorted((root / package).rglob("*.py")):
            room = file.relative_to(root).parts[:-1][: 3 if "tools" in file.parts and package == "asyncrl" else 2]
            lines["/".join(room)].append(len(file.read_text(encoding="utf-8").splitlines()))
    for room, sizes in sorted(lines.items()):
        print(f"{room:32} {len(sizes):4} files {sum(sizes):6} lines")
    graph = import_graph(root)
    product = [size for room, sizes in lines.items() if not room.startswith("tests") for size in sizes]
    tests = [size for room, sizes in lines.items() if room.startswith("tests") for size in sizes]
    small = [
        file
        for package in PACKAGES
        for file in (root / package).rglob("*.py")
        if not file.name.startswith("__") and len(file.read_text(encoding="utf-8").splitlines()) < SMALL
    ]
    found = cycles(graph)
    chain = longest_chain(graph, "learner")
    print(f"\nproduct: {len(product)} files, {sum(product)} lines; tests: {len(tests)} files, {sum(tests)} lines")
    print(f"files under {SMALL} lines: {len(small)}")
    print(f"import cycles: {len(found)}", *(" <-> ".join(group) for group in found), sep="\n  ")
    print(f"longest import chain inside learner: {len(chain)} files: {' > '.join(chain)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
