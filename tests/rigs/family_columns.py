"""Families that people use, with a column for each promise, as docs/families.md.

`python -m tests.rigs.family_columns --write docs/families.md [FAMILY ...]` measures and writes the page; rows of
families that are not named are kept as the page has them. `--vllm` samples with vLLM, too.

Each cell is a number of nats, the largest difference between log-probs, or the words of a refusal. References are
transformers' own passes of each row alone, over what the family's own processor makes of its prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncrl.checks.inputs import check_rotary
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import read_config
from asyncrl.models.loading import load_model
from asyncrl.models.lora import load_policy
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from asyncrl.models.small_copy import family_of
from asyncrl.processing.encoded_prompt import media_arguments
from asyncrl.processing.processor import PromptProcessor
from asyncrl.telemetry.host_versions import describe_environment
from asyncrl.user_functions import shorten
from asyncrl_plugins.vllm.plugin import HOTTEST
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.training.batch import make_batch
from learner.training.engine import TorchEngine
from learner.training.packing import PackedTrajectory, Segment, TrainGroup
from rollout_server.engines.hf.engine import HFEngine
from tests.conftest import small_config
from tests.plugins.tiled_images.tiny_tiled import TILED, make_tiled
from tests.rigs.alignment_rig import answers, parity_tickets, verify
from tests.rigs.family_matrix import make_folder, micro_batches
from tests.rigs.foreign_families import make_glm4v
from tests.rigs.tiny_families import make_expert_or_recurrent, make_family, make_llava
from tests.system.test_bad_input import image_rows, write_rows

COLUMNS = (
    "accepted",
    "packed = separate",
    "isolated",
    "learner = `hf`",
    "learner = vLLM",
    "LoRA",
    "several turns",
    "export",
)
NOT_RUN = "not run"
ROUNDED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
"""Families whose recurrence vLLM computes in bfloat16 alone on a CPU."""
TEXT = (
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("llama", "llama4_text", "mistral", "mistral (window 6)", "ministral3", "mixtral"),
    *("phi3", "phi3 (window 6)", "starcoder2", "starcoder2 (window 6)", "smollm3", "gpt_oss"),
    *("gemma2", "gemma3_text", "gemma3n_text", "granite", "granitemoehybrid", "lfm2 (convolutions)"),
    *("lfm2_moe (convolutions)", "olmo2", "olmo3", "glm4", "glm4_moe", "deepseek_v2 (6 of 64 experts)", "deepseek_v3"),
    *("falcon_h1", "nemotron_h", "minimax_m2"),
)
MAKERS: dict[str, Callable[[Path], Path]] = {
    **{family: lambda folder, family=family: make_folder(family, folder) for family in TEXT},
    **{family: lambda folder, family=family: make_family(family, folder) for family in ("qwen2_vl", "qwen2_5_vl")},
    "qwen3_vl": lambda folder: make_family("qwen3_vl", folder),
    **{f: lambda folder, f=f: make_expert_or_recurrent(f, folder) for f in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")},
    **{family: lambda folder, family=family: make_glm4v(family, folder) for family in ("glm4v", "glm4v_moe")},
    "llava": make_llava,
    **{family: lambda folder, family=family: make_tiled(family, folder) for family in TILED},
}
"""A folder with a small random model of each family."""
SIZES = ((40, 150), (28, 28), (90, 40), (160, 200))
"""Height and width in pixels of images in the rows of families that see."""
BACK = 6
"""Tokens of a completion that a rewritten history begins anew behind, and that an environment says."""


@dataclass(frozen=True)
class Family:
    """A folder, and rows of text or of none, one and three images."""

    config: RunConfig
    folder: Path
    processor: PromptProcessor
    tickets: Sequence[PreparedTicket]

    @classmethod
    def made(cls, name: str, folder: Path, *, sees: bool) -> Family:
        """Raises UserError for images of a family that are refused."""
        model = MAKERS[name](folder / "made")
        name_for_vllm(model / "config.json")
        if name in TEXT:
            spread(model)
        rows = [{"prompt": "one row"}, {"prompt": "another row, which is longer than that"}, {"prompt": "x"}]
        if sees:
            rows = image_rows(folder, SIZES)
        config = small_config(
            model,
            folder,
            folder / "run",
            data={
                **write_rows(folder, rows),
                "max_prompt_length": 400,
                "max_response_length": 12,
                "on_bad_row": "stop",
            },
            rollout={"temperature": family_of(ModelConfig(path=str(model))).temperature if name in TEXT else 0.8},
            batch={"prompts_per_step": 3, "group_size": 2},
            alignment={"rows": 3},
            learner={"device": "cpu", "optim": {"lr": 1e-2, "weight_decay": 0.0}},
        )
        processor = PromptProcessor(config.model)
        return cls(config, folder, processor, parity_tickets(config, processor))

    def of_model(self, **model: Any) -> RunConfig:
        """Configuration with other settings of the model."""
        given = {**self.config.model_dump(), "model": {**self.config.model.model_dump(), **model}}
        return self.config.model_copy(update={"model": RunConfig.model_validate(given).model})

    def engine(self, **model: Any) -> TorchEngine:
        """A learner's engine. Raises UserError for what cannot be trained."""
        config = self.of_model(**model)
        engine = TorchEngine(config.model_settings, config.learner.optim, 1)
        check_rotary(400, config.model, read_config(config.model))
        engine.prepare()
        return engine

    def groups(self) -> list[TrainGroup]:
        """Completions of random tokens, of unequal length, behind the rows' prompts."""
        draw, row, groups = np.random.default_rng(1), 0, list[TrainGroup]()
        allowed = np.setdiff1d(np.arange(10, len(self.processor.tokenizer)), [*self.processor.placeholder_ids])
        for item, lengths in zip(self.tickets, ((12, 24), (9, 17), (11,)), strict=True):
            rows: list[PackedTrajectory] = []
            for length in lengths:
                ids = draw.choice(allowed, length).astype(np.int32)
                rows.append(PackedTrajectory(row, ids, np.ones(length, bool)))
                row += 1
            groups.append(TrainGroup(self.processor.encode(item.ticket.prompt, item.blobs), tuple(rows)))
        return groups

    def plain(self, model: Any, number: int, token_ids: np.ndarray) -> torch.Tensor:
        """[T] log-probs of a completion of a row by one pass over what the family's own processor makes."""
        item = self.tickets[number]
        images = media_arguments([item.ticket.prompt], {name: bytes(data) for name, data in item.blobs.items()})
        given = {name: [values] for name, values in images.items()}
        text = [self.processor.render(item.ticket.prompt)]
        made = self.processor.processor(text=text, **given, add_special_tokens=False, return_tensors="pt")
        ids = torch.from_numpy(token_ids.astype(np.int64))
        inputs = {**made, "input_ids": torch.cat([made["input_ids"], ids[None]], dim=1)}
        del inputs["attention_mask"]
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in inputs and name in SEEN_TYPES.get(model.config.model_type, (name,)):
                inputs[name] = torch.nn.functional.pad(inputs[name], (0, len(ids)))
        if not images:
            inputs = {"input_ids": inputs["input_ids"]}
        elif "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)  # Llama 4 has them in bfloat16
        logits = model(**inputs, use_cache=False).logits[0, -len(ids) - 1 : -1]
        banned = torch.tensor(sorted(self.processor.placeholder_ids), dtype=torch.long)
        logprobs = sampling_logprobs(logits, temperature=self.config.rollout.temperature, banned=banned)
        return gather_logprobs(logprobs, ids)


def spread(folder: Path) -> None:
    """Scale the last norm of a model whose log-probs need a temperature above vLLM's highest to say something."""
    temperature = family_of(ModelConfig(path=str(folder))).temperature
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = {name.rpartition(".")[0] for name in tensors if "norm" in name and not re.search(r"layers\.\d", name)}
    if temperature <= HOTTEST or len(last) != 1:
        return
    kind = str(read_config(ModelConfig(path=str(folder)))["model_type"])
    offset = 1.0 if kind.startswith(("gemma2", "gemma3_")) else 0.0  # they scale by 1 + weight
    for name in [name for name in tensors if name.startswith(f"{min(last)}.")]:
        tensors[name] = (tensors[name] + offset) * (HOTTEST / temperature) - offset
    save_file(tensors, file, metadata={"format": "pt"})


def name_for_vllm(file: Path) -> None:
    """Write what released checkpoints name in their config.json, transformers does not need, and vLLM reads."""
    described = json.loads(file.read_text())
    text = described.get("text_config", described)
    match text["model_type"]:
        case "lfm2" | "lfm2_moe":
            text["conv_dim"] = text["block_dim"] = text["hidden_size"]
        case "glm4_moe":
            text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
        case "glm4v_moe_text":
            text["use_qk_norm"] = False
        case "minimax_m2":
            text["scoring_func"] = "sigmoid"
            text["rotary_dim"] = int(text["head_dim"] * text["rope_parameters"].get("partial_rotary_factor", 1.0))
        case "deepseek_v3":
            text["topk_method"] = "noaux_tc"
        case _:
            return
    file.write_text(json.dumps(described))


SEEN_TYPES: Mapping[str, Sequence[str]] = {}
"""Token types that a model takes; both where it is not named."""


def measure(name: str, folder: Path, *, vllm: bool) -> dict[str, str]:
    """The row of a family; that of its text alone where its images are refused."""
    blind = ""
    try:
        family = Family.made(name, folder, sees=name not in TEXT)
    except UserError as refusal:
        blind = f"; images: refused: {' '.join(str(refusal).split())}"
        family = Family.made(name, folder, sees=False)
    try:
        engine = family.engine()
    except UserError as refusal:
        return {COLUMNS[0]: f"refused: {refusal}"}
    plain: Any = load_model(family.config.model, device=torch.device("cpu"), text_attention="eager").eval()
    groups = family.groups()
    cells = {COLUMNS[0]: f"packed{blind}" if engine.packs else f"row by row: {engine.obstacle}"}
    ours = logprobs(engine, groups)
    places = [number for number, group in enumerate(groups) for _ in group.completions]
    rows = [completion for group in groups for completion in group.completions]
    with torch.no_grad():
        alone = [family.plain(plain, place, row.token_ids) for place, row in zip(places, rows, strict=True)]
    cells[COLUMNS[1]] = nats(ours, alone)
    cells[COLUMNS[2]] = said(lambda: isolated(engine, groups, ours))
    cells[COLUMNS[3]] = said(lambda: sampled(family, engine, HFEngine(family.config, family.processor)))
    cells[COLUMNS[4]] = said(lambda: by_vllm(family, engine)) if vllm else NOT_RUN
    cells[COLUMNS[5]] = said(lambda: adapter(family, groups))
    cells[COLUMNS[6]] = said(lambda: turns(family, engine, plain, groups))
    cells[COLUMNS[7]] = said(lambda: export(family, engine, groups))
    return cells


def logprobs(engine: TorchEngine, groups: Sequence[TrainGroup]) -> list[torch.Tensor]:
    """[T] of each row of the groups, of as many micro-batches as the learner makes of them."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    with torch.no_grad():
        for micro_batch in micro_batches(engine, groups):
            places = zip(micro_batch.row.tolist(), micro_batch.column.tolist(), strict=True)
            found |= dict(zip(places, engine.forward(micro_batch).logprobs, strict=True))
    rows = [completion for group in groups for completion in group.completions]
    return [torch.stack([found[row.row, i] for i in np.flatnonzero(row.is_trained).tolist()]) for row in rows]


def step(engine: TorchEngine, groups: Sequence[TrainGroup]) -> None:
    """Make an optimiser step of a loss with another weight for each token."""
    draw = torch.Generator().manual_seed(0)
    for micro_batch in micro_batches(engine, groups):
        values = engine.forward(micro_batch).logprobs
        engine.backward((values * torch.randn(len(values), generator=draw)).sum())
    engine.optimizer_step()


def isolated(engine: TorchEngine, groups: Sequence[TrainGroup], ours: Sequence[torch.Tensor]) -> str:
    """Largest change of other rows when the first one has other tokens."""
    first, *others = groups[0].completions
    changed = replace(first, token_ids=np.roll(first.token_ids, 1))
    now = logprobs(engine, [replace(groups[0], completions=(changed, *others)), *groups[1:]])
    assert float((now[0] - ours[0]).abs().max()) > 0
    return nats(now[1:], ours[1:])


def sampled(family: Family, engine: TorchEngine, sampler: Any) -> str:
    """Largest difference between the log-probs that an engine says, and the learner's of its tokens."""

    async def live() -> list[ReceivedGroup]:
        await sampler.start()
        try:
            return await answers(sampler, family.processor, family.tickets)
        finally:
            await sampler.close()

    received = asyncio.run(asyncio.wait_for(live(), 900))
    for one in received:
        verify(one)
    batch = make_batch(received, family.processor)
    ours = logprobs(engine, batch.train_groups)
    theirs = torch.cat([torch.from_numpy(one.group.logprobs.copy()) for one in received])
    return nats(ours, theirs.split([len(values) for values in ours]))


def by_vllm(family: Family, engine: TorchEngine) -> str:
    from asyncrl_plugins.vllm.engine import VLLMEngine
    from tests.plugins.vllm.vllm_rig import fork_cores

    rounded = family_of(family.config.model).described.model_type in ROUNDED
    if rounded:
        family = replace(family, config=family.of_model(dtype="bfloat16"))
    rollout = {**family.config.rollout.model_dump(), "engine": "vllm", "max_concurrent_sequences": 32}
    rollout["temperature"] = min(rollout["temperature"], HOTTEST)
    config = RunConfig.model_validate({**family.config.model_dump(), "rollout": rollout})
    fork_cores(config)
    if rounded or config.rollout.temperature != family.config.rollout.temperature:
        family = replace(family, config=config, tickets=parity_tickets(config, family.processor))
        engine = family.engine()
    with root_cause():
        cell = sampled(family, engine, VLLMEngine(config, family.processor))
    return f"bfloat16: {cell}" if rounded else cell


@contextmanager
def root_cause() -> Iterator[None]:
    """Raise the error that a process of vLLM has ended with, in place of its parent's, which names none."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except RuntimeError as error:
            said.seek(0)
            causes = re.findall(r"(\w*(?:Error|Exception): .*)$", said.read(), re.MULTILINE)
            own = [cause for cause in causes if "See root cause" not in cause]
            raise RuntimeError(own[-1] if own else error) from None
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def adapter(family: Family, groups: Sequence[TrainGroup]) -> str:
    """Learner with a trained adapter against transformers with its PEFT folder."""
    engine = family.engine(lora={"rank": 4})
    step(engine, groups)
    engine.export(family.processor.processor, family.folder / "adapter")
    policy = load_policy(family.config.model, family.folder / "adapter").eval()
    return nats(logprobs(engine, groups), alone(family, policy, groups))


def export(family: Family, engine: TorchEngine, groups: Sequence[TrainGroup]) -> str:
    """Learner after a step against transformers with the exported folder."""
    step(engine, groups)
    engine.export(family.processor.processor, family.folder / "export")
    path = family.config.model.model_copy(update={"path": str(family.folder / "export")})
    plain = load_model(path, device=torch.device("cpu"), text_attention="eager").eval()
    return nats(logprobs(engine, groups), alone(family, plain, groups))


def turns(family: Family, engine: TorchEngine, plain: Any, groups: Sequence[TrainGroup]) -> str:
    """A completion whose middle an environment said, and one whose history was rewritten."""
    group = groups[0]
    first, second = group.completions
    told = np.ones(len(first.token_ids), bool)
    told[BACK : 2 * BACK - 2] = False
    whole = family.plain(plain, 0, first.token_ids)[torch.from_numpy(told)]
    one = replace(group, completions=(replace(first, is_trained=told),))
    found = nats(logprobs(engine, [one]), [whole.detach()])
    again = replace(group, completions=(replace(second, segments=(Segment(), Segment(BACK))),))
    parts = [family.plain(plain, 0, ids).detach() for ids in (second.token_ids[:BACK], second.token_ids[BACK:])]
    return f"{found}; rewritten: {said(lambda: nats(logprobs(engine, [again]), [torch.cat(parts)]))}"


@torch.no_grad()
def alone(family: Family, model: Any, groups: Sequence[TrainGroup]) -> list[torch.Tensor]:
    """[T] of each row by a plain pass."""
    return [
        family.plain(model, number, completion.token_ids)
        for number, group in enumerate(groups)
        for completion in group.completions
    ]


def nats(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> str:
    largest = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    return "0" if largest == 0 else f"{largest:.0e}".replace("e-0", "e-")


def said(cell: Callable[[], str]) -> str:
    try:
        return cell()
    except UserError as refusal:
        return f"refused: {' '.join(str(refusal).split())}"
    except Exception as error:  # of the family's own code, or of an engine
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- the page -------------------------------------------------------------------------------------

HEADING = """# Families

Small random models of the families that people use, on a CPU in float32: one row of numbers for each, measured by
`python -m tests.rigs.family_columns --vllm --write docs/families.md`. This page documents, and decides nothing: what a
family can do is found at the start of each run ([models](models.md)).

Numbers are the largest difference of log-probs in nats. Rows of families that see have none, one and three images.

- **accepted**: rows of a group are packed behind one prompt, or computed row by row.
- **packed = separate**: the learner, against transformers' own pass of each row alone.
- **isolated**: change of all other rows when one row has other tokens.
- **learner = `hf`, vLLM**: log-probs that the engine says of what it sampled, against the learner's.
  Both sides are in bfloat16 where vLLM's recurrence takes nothing else on a CPU.
  A number above 1e-4 in float32 means that vLLM computes something else than transformers: such a family wants the
  engine `hf`, or a correction. Some small models fail by sizes or tokens that released ones do not have.
- **LoRA**: rank 4 on all linear layers after a step, against transformers and PEFT with the exported adapter.
- **several turns**: a row in whose middle an environment speaks; then one whose history was rewritten.
- **export**: the learner after a step, against transformers with the exported folder.
"""


def page(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Table, and below it the words that are too long for it, each once."""
    notes: dict[str, int] = {}

    def cell(family: str, text: str) -> str:
        words = re.sub(rf"/tmp/\S*|\b{family.partition(' ')[0]}\b", "...", text)
        found = re.search(r"refused: |row by row: |\w*(?:Error|Exception): ", words)
        if found is None:
            return words
        says = found[0][:-2] if found[0][0].islower() else "fails"
        why = words[found.start() if says == "fails" else found.end() :]
        return f"{words[: found.start()]}{says} [{notes.setdefault(shorten(why), len(notes) + 1)}]"

    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in [name for name in MAKERS if name in rows]:
        lines.append(f"| {name} | {' | '.join(cell(name, rows[name].get(column, '-')) for column in COLUMNS)} |")
    host = describe_environment()
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, {host['cores']} cores of an "
    versions += f"{host['cpu']}; last row measured on {date.today().isoformat()}."
    words = "\n".join(f"{number}. {text}" for text, number in notes.items())
    return f"{HEADING}\n{versions}\n\n" + "\n".join(lines) + f"\n\n## Words\n\n{words}\n"


def written(text: str) -> dict[str, dict[str, str]]:
    """Rows of a page, their words in their places again."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))

    def whole(cell: str) -> str:
        said = re.sub(r"\bfails \[(\d+)\]", lambda found: notes[found[1]], cell)
        return re.sub(r" \[(\d+)\]", lambda found: f": {notes[found[1]]}", said)

    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: dict(zip(COLUMNS, map(whole, cells), strict=True)) for name, *cells in lines[1:]}


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--vllm", action="store_true")
    given = parser.parse_args(list(arguments) if arguments is not None else None)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = written(given.write.read_text()) if given.write and given.families else {}
    for name in given.families or MAKERS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows[name] = measure(name, Path(folder), vllm=given.vllm)
            except Exception as error:  # of the family's own code
                rows[name] = {COLUMNS[0]: f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(name, json.dumps(rows[name]), flush=True)
        if given.write:
            given.write.write_text(page(rows))


if __name__ == "__main__":
    main()
