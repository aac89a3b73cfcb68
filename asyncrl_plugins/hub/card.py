"""A model card made from a run: what it began with, how it was trained, how far it came, and what was verified."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.explain import method_line
from asyncrl.config.load import leaves
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.run_inputs import COMPONENT, SOURCE, recorded_updates
from asyncrl.model_files.folder import has_eyes, read_config
from asyncrl.run_folder.export_record import ExportRecord
from asyncrl.telemetry.host_versions import read_starts
from asyncrl_plugins.hub.account import History, number, open_journal, read_account, read_history
from asyncrl_plugins.hub.sources import data_files, hub_dataset, hub_model, licence_of, licence_texts

ROWS = 8
"""Most rows of the learning curve."""
SECTIONS = ("model", "algorithm", "batch", "learner", "critic", "reference", "rollout", "trainer", "sft")
"""Sections whose settings a card shows. Others say where a run was, or may hold a secret."""
UNSHOWN = ("device", "cpu_threads")
"""Keys about the machine."""
_OWN_FILE = re.compile(r"\S*/(?=[^\s/]+\.py:)")
"""Folders of a method of the user's own."""


@dataclass(frozen=True)
class Exported:
    """The export that a card describes."""

    run: Path
    config: RunConfig
    step: int | None
    """Step of the checkpoint; None where the run has none."""
    is_adapter: bool
    """True for an adapter alone, without its base."""
    dtype: str
    record: ExportRecord | None = None
    """Record in the exported folder; None before there is one."""
    repository: str = ""
    """Name on the hub; empty where it is not known yet."""
    page: str = ""
    """README.md that the export has of its own, beside an adapter on a quantised base; empty where it has none."""


def model_card(exported: Exported) -> str:
    """Markdown with the front matter that the hub reads. Equal for equal files of the run. Raises BadStateError for a
    damaged journal."""
    config, history = exported.config, read_history(exported.run, exported.step)
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(exported), sort_keys=False)}---",
        f"# {exported.repository.rpartition('/')[2] or exported.run.absolute().name}",
        _summary(exported),
        "## Use",
        _use(exported),
        "## Method",
        *_method(config, exported.run),
        "## Data",
        *_data(config, exported.run),
        "## Learning curve",
        _curve(history),
        "## Verified",
        "\n".join(f"- {line}" for line in _verified(exported, history)),
        "## Versions",
        _versions(exported.run),
        "## Licence",
        _licence(config),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(exported: Exported) -> dict[str, Any]:
    config = exported.config
    base = hub_model(config.model)
    data = sorted({found for name in config.data.train_files if (found := hub_dataset(name))})
    method = ["sft"] if _is_supervised(exported.run) else [config.algorithm.adv_estimator, config.algorithm.policy_loss]
    tags = ["asyncrl", *(["reinforcement-learning"] if "sft" not in method else []), *method]
    return {
        **licence_of(config.model),
        **(
            {"base_model": base, "base_model_relation": "adapter" if exported.is_adapter else "finetune"}
            if base
            else {}
        ),
        "library_name": "peft" if exported.is_adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if _sees(config) else "text-generation",
        **({"datasets": data} if data else {}),
        "tags": [tag.rpartition(":")[2] for tag in tags],
    }


def _is_supervised(run: Path) -> bool:
    return not (run / JOURNAL_FILE).is_file()


def _described(config: RunConfig) -> Mapping[str, Any]:
    """The base's config.json; nothing where its folder has gone."""
    with suppress(UserError):
        return read_config(config.model)
    return {}


def _sees(config: RunConfig) -> bool:
    return has_eyes(_described(config))


def _base(config: RunConfig) -> str:
    """The base model in words: its name on the hub, or the last part of its folder."""
    return hub_model(config.model) or f"{Path(config.model.path).name} (a folder, not on the hub)"


def _summary(exported: Exported) -> str:
    form = "an adapter (LoRA) without its base" if exported.is_adapter else "a whole model"
    of_step = f" after step {exported.step}" if exported.step is not None else ""
    how = "Supervised training" if _is_supervised(exported.run) else "Reinforcement learning"
    text = f"{how} of {_base(exported.config)} by asyncrl{of_step}: {form}, {exported.dtype}."
    return f"{text}\n\n**{exported.record.describe()}**" if exported.record and exported.record.differs else text


def _use(exported: Exported) -> str:
    config, name = exported.config, exported.repository or "ORG/NAME"
    if exported.is_adapter and config.model.quantization:
        told = exported.page.partition("\n")[2].replace("THIS_FOLDER", name).strip()
        plain = "On the plain base it is another policy; README.md of the export has the code that loads it."
        return told or f"The policy is this adapter beside its base in {config.model.quantization}. {plain}"
    model = "AutoModelForImageTextToText" if _sees(config) else "AutoModelForCausalLM"
    reader = "AutoProcessor" if _sees(config) else "AutoTokenizer"
    code = ", trust_remote_code=True" if "auto_map" in _described(config) else ""
    loads = f'dtype="{exported.dtype}"{code})'
    lines = [f"from transformers import {model}, {reader}", ""]
    if exported.is_adapter:
        base = hub_model(config.model)
        where = "" if base else f"  # the folder that the run began with: {Path(config.model.path).name}"
        lines[0:1] = ["from peft import PeftModel", lines[0]]
        lines += [f'base = {model}.from_pretrained("{base or "path/to/base"}", {loads}{where}']
        lines += [f'model = PeftModel.from_pretrained(base, "{name}")']
    else:
        lines += [f'model = {model}.from_pretrained("{name}", {loads}']
    return "\n".join(["```python", *lines, f'processor = {reader}.from_pretrained("{name}"{code})', "```"])


def _method(config: RunConfig, run: Path) -> Iterator[str]:
    method = _OWN_FILE.sub("", method_line(config.algorithm))
    yield "Supervised (`asyncrl sft`)." if _is_supervised(run) else f"By {method}."
    settings = list(_settings(config.model_dump(mode="json", exclude_defaults=True)))
    yield "Settings that are not asyncrl's defaults:"
    yield _table(("setting", "value"), [(f"`{key}`", _cell(value)) for key, value in settings])
    if config.environment.is_used:
        yield f"Turns are played in the environment `{config.environment.name.rpartition('/')[2]}`."


def _settings(changed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield key and value. Mappings whose names are free are left out: a user may have written anything into them."""
    for place, value in leaves({name: value for name, value in changed.items() if name in SECTIONS}):
        if not isinstance(value, Mapping) and place[-1] not in UNSHOWN:
            yield ".".join(map(str, place)), value


def _data(config: RunConfig, run: Path) -> Iterator[str]:
    sources = (("training", config.data.train_files), ("held out", config.data.val_files))
    rows = [(purpose, f"`{file}`", digest) for purpose, names in sources for file, digest in data_files(names)]
    yield _table(("rows", "file", "SHA-256 begins with"), rows)
    if _is_supervised(run):
        return
    with open_journal(run) as journal:
        recorded = recorded_updates(journal, "inputs")
    inputs = recorded[-1].settings if recorded else {}
    prints = [
        f"{name.removeprefix('fingerprint of the ')} `{value}`" for name, value in inputs.items() if "print" in name
    ]
    if prints:
        yield f"Fingerprints of what the run read, from its journal: {', '.join(prints)}."
    rewards = [(name.removeprefix(COMPONENT), of) for name, of in inputs.items() if name.startswith(COMPONENT)]
    if rewards:
        yield "Rewards:"
        shown = [(name, f"`{of['function']}`", of["weight"], f"`{of.get(SOURCE, '-')}`") for name, of in rewards]
        yield _table(("component", "function", "weight", "hash of its file"), shown)


def _curve(history: History) -> str:
    if not history.steps and not history.evaluations:
        return "The run has no record of its steps."
    held_out = {line["step"]: line for line in history.evaluations}
    name = "reward" if any("reward/mean" in step for step in history.steps) else "loss"
    metric = "reward/mean" if name == "reward" else "loss"
    rows, before = [], -1
    for step in history.points(ROWS):
        line = held_out.get(step, {})
        accuracy, error = number(line.get("accuracy")), number(line.get("accuracy_error"))
        shown = "-" if accuracy is None else f"{accuracy:.3f}" + (f" ± {error:.3f}" if error is not None else "")
        mean = history.mean(metric, before, step)
        rows.append((step, shown, "-" if mean is None else f"{mean:.3f}"))
        before = step
    heading = ("step", "held-out accuracy", f"{name}, mean since the row above")
    return _table(heading, rows)


def _verified(exported: Exported, history: History) -> Iterator[str]:
    if _is_supervised(exported.run):
        yield "The run is supervised: it has no journal of samples."
        return
    account = read_account(exported.run)
    with open_journal(exported.run) as journal:
        run_id, last = journal.meta("run_id"), journal.last_step()
    dropped = ", ".join(f"{reason} {count}" for reason, count in account.dropped.items()) or "none"
    yield (
        f"Samples accounted for, of run `{run_id}` with {last} steps: {account.issued} groups issued = "
        f"{account.trained} trained + {sum(account.dropped.values())} dropped ({dropped}) + {account.unfinished} "
        f"unfinished + residual {account.residual}."
    )
    largest = history.largest("ledger_residual")
    if largest is not None:
        yield f"Largest residual at any of the {len(history.steps)} recorded steps: {largest:g}."
    if trajectories := history.trajectories():
        yield f"Trajectories by status: {', '.join(f'{name} {count}' for name, count in trajectories.items())}."
    if (gap := history.largest("logprob_diff_max")) is not None:
        yield f"Log-probs of the engine that sampled and of the learner differ by at most {gap:.2g} nats a token."
    if exported.record and exported.record.logprob_gap is not None:
        record = exported.record
        yield (
            f"The exported weights differ from the sampled policy by {record.logprob_gap:.2g} nats a token, over "
            f"{record.tokens} tokens."
        )


def _versions(run: Path) -> str:
    starts = read_starts(run)
    if not starts:
        return "The run has no record of its packages."
    packages = {"python": starts[-1].get("python", "?"), **dict(starts[-1].get("packages") or {})}
    commit = dict(starts[-1].get("git") or {}).get("asyncrl")
    text = ", ".join(f"{name} {version}" for name, version in packages.items())
    return f"{text}{f'; commit of asyncrl {commit}' if commit else ''}, on {starts[-1].get('device', 'unknown')}."


def _licence(config: RunConfig) -> str:
    named, base = licence_of(config.model), _base(config)
    if named:
        return f"That of the base model, {base}: {', '.join(named.values())}."
    if texts := licence_texts(config.model):
        return f"The folder of the base model, {base}, has {', '.join(texts)}."
    return f"The folder of the base model, {base}, names none."


def _table(heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _cell(value: Any) -> str:
    """A value of the configuration; of models and files the last part of their paths alone."""
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "none"
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    text = text.rpartition("/")[2]
    return textwrap.shorten(text.replace("|", "\\|"), 200, placeholder=" ...")
