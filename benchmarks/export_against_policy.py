"""Exports against the policies that were sampled: log-probs of sampled tokens, and held-out accuracy of both.

    python -m benchmarks.export_against_policy --folder FOLDER [--steps 10] [--rows 200] [--engines hf vllm]
        [--dtypes float32 bfloat16] [--kinds full lora]

Trains the demo's warm start some steps for each kind, dtype and engine. The engine then samples held-out rows with the
last version, as in the run, and the log-probs of these tokens are computed with the exported folder: mean absolute
difference. The policy's accuracy is the run's own last evaluation, that of an export is `asyncrl eval`'s. With LoRA the
other forms are compared, too: merged in fp32, and merged in the base's dtype, as exports were at first.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import platform
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.demo.prepare import prepare
from asyncrl.devices.device import resolve_dtype
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.export import export_model
from asyncrl.models.loading import model_of_export
from asyncrl.models.lora import is_adapter_folder, load_policy, read_adapter
from asyncrl.processing.processor import PromptProcessor
from asyncrl.run_folder.contents import EXPORT_FOLDER, policy_folder
from asyncrl.run_folder.export_record import read_record
from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.evaluation.adapters import settings_of, start_policy
from asyncrl_plugins.evaluation.plain_scores import evaluate
from learner.groups.ticket import ReceivedGroup
from learner.loop.logprob_parity import compare
from learner.loop.policy_export import export_policy
from learner.tickets.ticket_writer import TicketWriter
from learner.training.engine import TorchEngine
from protocol.messages import Group, TicketKind
from rollout_server.engines import create_engine
from rollout_server.production.group_producer import GroupProducer

SAMPLED_ROWS, GROUP_SIZE = 24, 2
LORA = ("model.lora.rank=4", "learner.optim.lr=2e-3")


def with_policy(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration of a model that is a folder, or an adapter of its base."""
    if is_adapter_folder(folder):
        return changed(config, {"model": settings_of(config.model, folder)})
    return changed(
        config, {"model": model_of_export(config.model, folder), "model.path": str(folder), "model.lora.rank": 0}
    )


async def sample(config: RunConfig, folder: Path, processor: PromptProcessor) -> list[ReceivedGroup]:
    """Groups of held-out rows, sampled by the run's engine with the policy of `folder`."""
    of_run = with_policy(config, folder)
    writer = TicketWriter(of_run.ticket_settings, processor, processor.ends.stop_token_ids)
    items = [writer.write(TicketSlot(i, i, version=0, bound=0)) for i in range(SAMPLED_ROWS)]
    tickets = [item.ticket.model_copy(update={"kind": TicketKind.PARITY}) for item in items]
    blobs = {digest: memoryview(data) for item in items for digest, data in item.blobs.items()}
    engine = create_engine(of_run, processor)
    try:
        await start_policy(engine, of_run, folder)
        producer = GroupProducer(engine, None, processor, "benchmark")  # type: ignore[arg-type]  # nothing is scored
        made = [answer async for answer in producer.produce(tickets, blobs)]
    finally:
        await engine.close()
    groups = {group.ticket_id: group for group in made if isinstance(group, Group)}
    return [ReceivedGroup(item, groups[item.ticket.ticket_id]) for item in items]


def gap(config: RunConfig, folder: Path, processor: PromptProcessor, received: list[ReceivedGroup]) -> float:
    """Mean difference between the recorded log-probs and those of the model in `folder`."""
    of_folder = with_policy(config, folder)
    engine = TorchEngine(of_folder.model_settings, config.learner.optim, total_updates=1)
    engine.prepare()
    if engine.adapter:
        engine.load_published((name, tensor.float()) for name, tensor in read_adapter(folder).items())
    return compare(engine, processor, received, config.batch.microbatch_tokens).mean


def measure(run: Path) -> list[dict[str, object]]:
    """Log-prob gap and accuracy of each form of a finished run's policy; the first is the run's own export."""
    config = resolve_dtype(load_config(run / "config.yaml", []))
    config = changed(config, {"batch.group_size": GROUP_SIZE, "data.train_files": config.data.val_files})
    processor, policy = PromptProcessor(config.model), policy_folder(run, None)
    received = asyncio.run(sample(config, policy, processor))
    forms = {"export": run / EXPORT_FOLDER}
    if is_adapter_folder(policy):
        forms |= {"merged in float32": run / "merged", f"merged in {config.model.dtype}": run / "rounded"}
        export_policy(run, policy, run / "merged", merged=True)
        whole = load_policy(config.model, policy).merge_and_unload()
        export_model(whole, processor.processor, run / "rounded")
    accuracy = read_lines(run / "evaluations.jsonl")[-1]["accuracy"]
    tokens = sum(int(one.group.lengths.sum()) for one in received)
    return [
        {
            "form": form_of(folder) if name == "export" else name,
            "tokens": tokens,
            "gap": gap(config, folder, processor, received),
            "policy": accuracy,
            "accuracy": evaluate(config, folder).accuracy,
        }
        for name, folder in forms.items()
        if not (name == "merged in float32" and not is_adapter_folder(run / EXPORT_FOLDER))
    ]


def form_of(folder: Path) -> str:
    record = read_record(folder)
    return "unknown" if record is None else f"{record.form}, {record.dtype}"


def train(folder: Path, run: Path, *overrides: str) -> None:
    command = [sys.executable, "-m", "asyncrl", "train", str(folder / "config.yaml"), f"run_dir={run}", *overrides]
    with (folder / f"{run.name}.log").open("wb") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=200, help="held-out rows that are scored")
    installed = ["hf", *(["vllm"] if importlib.util.find_spec("vllm") else [])]
    parser.add_argument("--engines", nargs="+", default=installed)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--kinds", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--measure", type=Path, metavar="RUN", help="print the figures of one finished run, as JSON")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    folder, steps = arguments.folder, arguments.steps
    if not (folder / "config.yaml").is_file():
        prepare(folder, 1)
    print(f"{platform.processor() or platform.machine()}, {time.strftime('%Y-%m-%d')}, {steps} steps", flush=True)
    print("| trained | model.dtype | engine | form | log-prob gap, nats a token | accuracy: policy | form |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for kind, dtype, engine in product(arguments.kinds, arguments.dtypes, arguments.engines):
        run = folder / f"{kind}-{dtype}-{engine}"
        if not (run / EXPORT_FOLDER).is_dir():
            settings = [f"model.dtype={dtype}", f"rollout.engine={engine}", *(LORA if kind == "lora" else ())]
            limits = [
                f"trainer.max_steps={steps}",
                f"evaluation.every_steps={steps}",
                f"data.max_val_rows={arguments.rows}",
            ]
            train(folder, run, *settings, *limits, "batch.prompts_per_step=8", "evaluation.before_training=false")
        command = [sys.executable, "-m", "benchmarks.export_against_policy", "--folder", str(folder), "--measure"]
        said = subprocess.run([*command, str(run)], check=True, capture_output=True, text=True).stdout
        for found in json.loads(said.splitlines()[-1]):
            figures = f"{found['gap']:.1e} | {found['policy']:.3f} | {found['accuracy']:.3f}"
            print(f"| {kind} | {dtype} | {engine} | {found['form']} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
