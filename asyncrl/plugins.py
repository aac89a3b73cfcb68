"""Plug-ins: parts beside the core, found through the entry points of installed packages.

A package registers a part in its `pyproject.toml`:

    [project.entry-points."asyncrl.rollout_engines"]
    sglang = "asyncrl_plugins.sglang.plugin:ENGINE"

The entry loads a description: one of the frozen classes below. A description never imports torch, since configurations
are checked without it; the implementation is named as `module:name` and imported when it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

from asyncrl.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

logger = logging.getLogger(__name__)

Group = Literal[
    "commands",
    "decode_batches",
    "demos",
    "displays",
    "evaluators",
    "exporters",
    "options",
    "rollout_engines",
    "learner_engines",
    "weight_channels",
    "models",
    "environments",
    "rewards",
    "sample_writers",
    "methods",
    "tasks",
    "trackers",
    "names",
]
"""Entry point group, without its prefix `asyncrl.`."""


def no_problems(config: Any) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Part:
    """One value of a configuration key: an engine, a channel, a tracker, an environment; or a part that is
    in use where it is installed: a display, a writer of samples."""

    implementation: str
    """`module:name`, imported when the part is used."""
    section: type[BaseModel] | None = None
    """The part's own settings. They stand in a section of its name, which exists only where the part is chosen."""
    problems: Callable[[Any], Iterable[str]] = no_problems
    """Errors of a configuration (RunConfig) that chooses the part, each with its fix. Imports no torch."""
    packages: tuple[str, ...] = ()
    """Distributions that the part needs beside those of the core."""
    extra: str = ""
    """Extra of this distribution that installs them."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts that the core asks about parts of this group; their names stand where the group is used."""


def no_check(component: Any) -> None:
    return None


def no_model(component: Any) -> tuple[str, str]:
    return "", ""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward by its name in `reward.functions`. The callables take its entry there, a RewardFunctionConfig."""

    implementation: str
    """`module:function` of a RewardSample and the entry's `kwargs`; of a scorer `module:function` of the
    entry, which returns an asyncrl.rewards.process_scorer.ProcessScorer."""
    is_scorer: bool = False
    """True for what scores in processes of its own; functions run in `reward.workers`."""
    is_group: bool = False
    """True for a function of all samples of a group, which returns as many numbers. Its entry has `group: true`."""
    check: Callable[[Any], None] = no_check
    """Raise UserError for a mistake in the entry of a scorer. Imports no torch."""
    model: Callable[[Any], tuple[str, str]] = no_model
    """Folder and device of a model that the entry loads, such as cuda:1; empty where it loads none."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Models whose images the core does not know, by the `model_type` of their config.json."""

    images: str
    """`module:class` of the family's images, an ImageGrids of asyncrl.processing.image_grids."""
    register: str = ""
    """`module:function` that makes transformers' Auto classes know the models. Called before each folder is read; empty
    where transformers knows them."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Rollout engines that do not serve the models, each with the part of the models that it lacks."""


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """Tasks, each a word on the command line: data, prompt template and rewards in one overlay."""

    overlays: Path
    """Folder of YAML files. The name of each is a word."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `asyncrl`."""

    help: str
    run: str
    """`module:function`, called with the parsed arguments; returns the exit code."""
    add_arguments: Callable[[Any], None] = lambda parser: None
    """Add options and arguments to the command's parser."""
    takes_config: bool = False
    """Begin with the arguments `config` and `overrides`, as `asyncrl train` does."""
    section: str = ""
    """`module:class` of the command's own settings, in a section of its name: lists of commands do not import it."""
    parses_words: bool = False
    """Leave all words of the command line to `run`, as `arguments.words`."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A demo: `asyncrl demo NAME`."""

    help: str
    run: str
    """`module:function`, called with an asyncrl.demo.choice.DemoRequest."""
    is_main: bool = False
    """True for the one that `asyncrl demo` without a name runs."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a command, such as `--profile` of `asyncrl train`."""

    command: str
    flag: str
    run: str
    """`module:function`, called before the command where the option is given. It takes the parsed arguments, may change
    them, and returns an exit code in place of the command's, or None to go on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of argparse's `add_argument`, such as `help`."""


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """Both services' metrics for a monitoring system. The first installed one, by name, is in use."""

    learner: str
    """`module:class`, a learner.reporting.exporter.LearnerExporter."""
    rollout_server: str
    """`module:class`, a rollout_server.exporter.ServerExporter."""


P = TypeVar("P", bound=Part)


@cache
def _entries() -> EntryPoints:
    """All entry points of the environment: to find them reads a file of each installed package."""
    found: Any = entry_points()  # Python 3.11 calls the class SelectableGroups
    return found


@cache
def installed(group: Group) -> Mapping[str, EntryPoint]:
    """Entry points of a group by name. Loads none."""
    found = sorted(_entries().select(group=f"asyncrl.{group}"), key=lambda entry: entry.name)
    return {entry.name: entry for entry in found}


@cache
def description(group: Group, name: str) -> Any:
    """Load the description of an installed part. Raises UserError where its package cannot be imported."""
    entry = installed(group)[name]
    try:
        return entry.load()
    except Exception as error:
        raise UserError(
            f"the plug-in {entry.value} of asyncrl.{group} cannot be loaded: {type(error).__name__}: {error}. "
            "Fix or uninstall its package"
        ) from error


def descriptions(group: Group) -> Mapping[str, Any]:
    """Load the descriptions of all installed parts of a group."""
    return {name: description(group, name) for name in installed(group)}


@dataclass(frozen=True)
class Parts(Generic[P]):
    """Parts that one configuration key names: those of the core, and those of installed plug-ins."""

    group: Group
    key: str
    """Path of the key: `rollout.engine`."""
    kind: type[P]
    """Class of their descriptions."""
    built_in: dict[str, P] = field(default_factory=dict)
    takes_own: bool = False
    """True where a user's own part may be named as `file.py:Class`."""

    def find(self, name: object) -> P | None:
        """None where neither the core nor an installed plug-in has the name."""
        if not isinstance(name, str) or name in self.built_in:
            return self.built_in.get(str(name))
        own = self.kind(implementation=name) if self.takes_own and ":" in name else None
        found = description(self.group, name) if name in installed(self.group) else own
        return found if isinstance(found, self.kind) else None

    def __getitem__(self, name: str) -> P:
        """Raises ValueError with the names that there are, and what to install."""
        part = self.find(name)
        if part is None:
            names = list(self.all())
            there = f"there {'is only' if len(names) == 1 else 'are'} {', '.join(names) or 'none'}"
            near, install = did_you_mean(name, names), what_to_install(self.group)
            own = "; your own is path/to/file.py:Class" * self.takes_own
            raise ValueError(f"{self.key} is {name!r}, and {there}{own}.{near} {install}")
        return part

    def all(self) -> dict[str, P]:
        """Descriptions by name, those of installed plug-ins last."""
        installed_ones = descriptions(self.group).items()
        return {**self.built_in, **{name: each for name, each in installed_ones if isinstance(each, self.kind)}}


def sections_of(parts: Mapping[str, Part | None]) -> dict[str, Any]:
    """Sections of the parts that have settings, by their names."""
    return {name: part.section for name, part in parts.items() if part is not None and part.section is not None}


def installed_exporter() -> Exporter | None:
    """The exporter in use, if one is installed; where none is, the log says that no metrics are served."""
    exporter = next((description("exporters", name) for name in installed("exporters")), None)
    if exporter is None:
        logger.info("no metrics are served: no exporter is installed. %s", what_to_install("exporters"))
    return exporter


def installed_evaluator(asked_by: str) -> Part:
    """The first installed evaluator: a function of a RunConfig and a model folder, which completes the held-out rows
    and returns a `sample` (RewardSample) and a `score` (Score) of each completion, those of a row one after the other.

    Raises UserError where none is installed."""
    for name in installed("evaluators"):
        return description("evaluators", name)
    raise UserError(f"{asked_by} needs an evaluator, and none is installed. {what_to_install('evaluators')}")


def implementation(path: str) -> Any:
    """Import `module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def what_to_install(group: Group) -> str:
    """Sentence for a name that neither the core nor an installed plug-in has: what to install."""
    whole = "Run `make install` in a checkout, or install the whole wheel"
    if find_spec("asyncrl_plugins") is None:
        return f"This installation of asyncrl has no plug-ins: its wheel was built without asyncrl_plugins. {whole}"
    entries = (entry for each in get_args(Group) for entry in installed(each).values())
    if not any(entry.value.startswith("asyncrl_plugins.") for entry in entries):
        return (
            "asyncrl_plugins is there, but the installed metadata of asyncrl name none of its parts: they are of an "
            f"older version. {whole}"
        )
    return f"A plug-in brings another one as an entry point of asyncrl.{group} (docs/plugins.md)"
