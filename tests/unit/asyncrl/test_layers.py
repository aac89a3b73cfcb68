"""Imports between packages, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts.structure import cycles, import_graph, rooms

ROOT = Path(__file__).parents[3]
PACKAGES = ("protocol", "asyncrl", "learner", "rollout_server")
PLUGINS = "asyncrl_plugins"
FILES = [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
OURS = set(PACKAGES)

FORBIDDEN = {
    "protocol": {PLUGINS, "asyncrl", "learner", "rollout_server", "torch", "transformers", "vllm", "deepspeed"},
    "asyncrl": {PLUGINS, "learner", "rollout_server", "vllm", "deepspeed"},
    "learner": {PLUGINS, "rollout_server", "vllm"},
    "rollout_server": {PLUGINS, "learner", "vllm", "deepspeed"},
}
MAY_START_SERVICES = ("asyncrl/cli.py", "asyncrl/launch/", "asyncrl/checks/")
TORCH_FREE = (
    "protocol/",
    "asyncrl/config/",
    "asyncrl/data/",
    "asyncrl/environments/",
    "asyncrl/demo/data.py",
    "asyncrl/demo/reward.py",
    "asyncrl/environments/",
    "asyncrl/rewards/",
    "asyncrl/telemetry/",
    "asyncrl/journal/",
    "asyncrl/run_folder/",
    "asyncrl/workers/",
)
SERIALISERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Absolute names of imported modules, those inside functions included, and their lines."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.module or "", node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func) in ("__import__", "importlib.import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield str(argument.value), node.lineno


def dotted(node: ast.AST) -> str:
    """A name with those that it is an attribute of; empty parts stand for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@cache
def parse(file: Path) -> tuple[ast.AST, ...]:
    """Imports and calls of a file."""
    tree = ast.parse((ROOT / file).read_text(), str(file))
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(ROOT)


def reads_or_writes_text_of_the_locale(call: ast.Call) -> bool:
    """Whether a call opens a text file, or a program's output, without an encoding."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in named:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) < (1 if name == "read_text" else 2)
    if name in ("run", "Popen", "check_output"):
        return bool({"text", "universal_newlines"} & named.keys())
    values = [value.value for value in (*call.args[:2], named.get("mode")) if isinstance(value, ast.Constant)]
    modes = [value for value in values if isinstance(value, str) and value and set(value) <= set("rwaxb+t")]
    if name == "open" and isinstance(call.func, ast.Name) and not modes:
        return True
    return name in ("open", "fdopen") and any("b" not in mode for mode in modes)


def test_text_is_read_and_written_in_an_encoding_of_its_own() -> None:
    """The locale's is another one on some machines, where templates and journals would be read as other text."""
    files = [*FILES, *(path.relative_to(ROOT) for path in sorted((ROOT / PLUGINS).rglob("*.py")))]
    calls = [(file, node) for file in files for node in parse(file) if isinstance(node, ast.Call)]
    wrong = [f"{file}:{call.lineno}" for file, call in calls if reads_or_writes_text_of_the_locale(call)]
    assert not wrong, "\n".join(wrong)


def test_there_is_something_to_check() -> None:
    assert {path.parts[0] for path in FILES} == OURS
    assert len(FILES) > 50


@pytest.mark.parametrize("package", PACKAGES)
def test_layers(package: str) -> None:
    wrong = []
    for file in FILES:
        if file.parts[0] != package:
            continue
        forbidden = set(FORBIDDEN[package])
        if file.as_posix().startswith(MAY_START_SERVICES):
            forbidden -= OURS
        wrong += [
            f"{file}:{line} imports {name}"
            for name, line in imported(parse(file))
            if name.partition(".")[0] in forbidden
        ]
    assert not wrong, "\n".join(wrong)


def test_tests_of_the_core_import_no_plug_in() -> None:
    """They run on a wheel that has none."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for folder in ("unit", "system", "gpu")
        for file in sorted((ROOT / "tests" / folder).rglob("*.py"))
        for name, line in imported(parse(file.relative_to(ROOT)))
        if name.startswith((PLUGINS, "tests.plugins", "tests.together"))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_through_others(graph: dict[str, set[str]]) -> None:
    found = cycles(graph)
    assert not found, "\n".join(" <-> ".join(group) for group in found)


def test_rooms_form_a_dag(graph: dict[str, set[str]]) -> None:
    found = cycles(rooms(graph, ROOT))
    assert not found, "\n".join(" <-> ".join(group) for group in found)


def test_only_its_command_knows_the_demo() -> None:
    importers = {
        file.as_posix()
        for file in FILES
        if not file.as_posix().startswith("asyncrl/demo/")
        for name, _ in imported(parse(file))
        if name.startswith("asyncrl.demo")
    }
    assert importers == {"asyncrl/cli.py"}


def test_light_parts_never_import_torch() -> None:
    wrong = [
        f"{file}:{line} imports {name}"
        for file in FILES
        if file.as_posix().startswith(TORCH_FREE)
        for name, line in imported(parse(file))
        if name.partition(".")[0] in ("torch", "transformers")
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_unpickled() -> None:
    assert not unpickling(FILES), "\n".join(unpickling(FILES))


def unpickling(files: Iterable[Path]) -> list[str]:
    """Lines by which a message, checkpoint or data file would be able to run code."""
    wrong = []
    for file in files:
        nodes = parse(file)
        wrong += [
            f"{file}:{line} imports {name}"
            for name, line in imported(nodes)
            if name.partition(".")[0] in SERIALISERS or name == "multiprocessing.reduction"
        ]
        for node in nodes:
            if isinstance(node, ast.Call) and (problem := unsafe_call(node)):
                wrong.append(f"{file}:{node.lineno} {problem}")
    return wrong


def unsafe_call(node: ast.Call) -> str:
    name = dotted(node.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name == "torch.load" and keywords.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
        return "numpy.load with allow_pickle"
    if name.endswith((".recv_pyobj", ".send_pyobj")):
        return f"{name} pickles"
    if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        return f"{name} can make any object"
    return ""


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("torch.load(p)", True),
        ("torch.load(p, weights_only=False)", True),
        ("torch.load(p, weights_only=True)", False),
        ("socket.recv_pyobj()", True),
        ("np.load(p, allow_pickle=True)", True),
        ("np.load(p)", False),
        ("yaml.load(t)", True),
    ],
)
def test_the_check_itself(code: str, bad: bool) -> None:
    node = ast.parse(code, mode="eval").body
    assert isinstance(node, ast.Call)
    assert bool(unsafe_call(node)) is bad
