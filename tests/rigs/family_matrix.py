"""Every text family of transformers as a small folder, trained and sampled from, against its own plain forward pass.

`python -m tests.rigs.family_matrix [FAMILY ...]` prints a line for each; `--write FILE` keeps the table.

Each family has a process with limits of memory, files and time: a family that cannot be made small would fill the
machine. Models are counted before they are built.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import re
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from asyncrl.checks.inputs import check_rotary
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.part_settings import ModelSettings
from asyncrl.config.sections import ModelConfig
from asyncrl.config.service_sections import LearnerConfig, OptimConfig, RolloutConfig
from asyncrl.demo.model import build_tokenizer
from asyncrl.errors import UserError
from asyncrl.model_files.folder import read_config
from asyncrl.models.loading import load_model, model_class
from asyncrl.models.small_copy import SmallFamily, family_of
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PLACEHOLDER_ID_NAMES, special_token_ids
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, PackedTrajectory, TrainGroup
from learner.training.roles import Roles
from protocol.messages import Sampling
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch
from rollout_server.engines.hf.decode_check import check_decoding
from rollout_server.engines.hf.grouped_attention import for_decoding

HEADING = """# Families of transformers

Small random models, every parameter redrawn, on a CPU in float32: the learner's log-probs and gradients, and log-probs
of what the `hf` engine samples, against plain passes of each row alone.
Made by `python -m tests.rigs.family_matrix --write docs/lab-log/families.md`. Settings in brackets differ from the
family's defaults; families that are configured with dropout by default are refused by that.
"""
SAME, SAME_GRADIENT = 1e-4, 1e-3
"""Nats, and part of a gradient's norm, by which two ways to compute a row may differ."""
CPU = torch.device("cpu")
LONGEST = 40
"""Tokens of the longest row at most."""
TEMPERATURE = 8.0
"""Keeps distributions of the small models spread, so that each token's log-prob says something."""
MOST_PARAMETERS = 300_000_000
MEMORY, FILE = 8 << 30, 2 << 30
"""Bytes of data and of a file that a family's process may have: a model is there twice, with gradients."""
DEADLINE_S = 600
ROPE = {"rope_theta": 1e4}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2 (convolutions)": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}),
    "lfm2_moe (convolutions)": ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}),
    "mistral (window 6)": ("mistral", {"sliding_window": 6}),
    "phi3 (window 6)": ("phi3", {"sliding_window": 6}),
    "starcoder2 (window 6)": ("starcoder2", {"sliding_window": 6}),
    "qwen2 (window 6)": (
        "qwen2",
        {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 4},
    ),
    "phi3 (longrope over 16 tokens)": (
        "phi3",
        {
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 16,
            "rope_parameters": {**ROPE, "rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 16},
        },
    ),
    "llama (dynamic over 16 tokens)": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}},
    ),
    "gpt2 (no dropout)": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "opt (no dropout)": ("opt", {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}),
    "phimoe (no noise)": ("phimoe", {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
    "hunyuan_v1_dense (heads of 128)": ("hunyuan_v1_dense", {"head_dim": 128}),
    "deepseek_v2 (6 of 64 experts)": (
        "deepseek_v2",
        {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    ),
    "dots1 (6 of 64 experts)": (
        "dots1",
        {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    **{name: (name, {"attention_multiplier": 128**-0.5}) for name in ("granite_swa", "granitemoe_swa")},
    "llama (yarn)": ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}),
}
"""Settings that the defaults of a family have not: its type, and what is set. With scores times 1, its default,
float32 alone moves log-probs of granite_swa by 1.4e-4 nats."""


def families() -> list[str]:
    """All of transformers' causal language models, and KINDS."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return sorted({*NAMES, *KINDS})


@dataclass(frozen=True)
class Verdict:
    """Finding about one family."""

    trains: str
    """packed, alone, refused, not built, crash, or WRONG."""
    samples: str
    """hf, refused, or WRONG."""
    why: str = ""
    """Reason of a refusal, or of rows alone."""


class NoSmallCopyError(Exception):
    """A family of which no small model can be made, or none that is small enough."""


def make_folder(family: str, folder: Path) -> Path:
    """A folder with a small random model, a tokenizer and its template.

    Raises NoSmallCopyError, and what the family's own code raises.
    """
    kind, settings = KINDS.get(family, (family, {}))
    given = folder / "given"
    transformers.CONFIG_MAPPING[kind](**settings).save_pretrained(given)
    tokenizer = build_tokenizer()
    small = SmallFamily(ModelConfig(path=str(given)))
    if small.problem:
        raise NoSmallCopyError(small.problem)
    text = getattr(small.described, "text_config", None) or small.described
    text.vocab_size = (len(tokenizer) + 63) // 64 * 64
    for part in {id(part): part for part in (text, small.described)}.values():
        part.eos_token_id, part.pad_token_id, part.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
        for name, value in list(vars(part).items()):
            if "vocab_size" in name and value:
                setattr(part, name, text.vocab_size)
            if "_token_i" in name and isinstance(value, int) and value >= text.vocab_size:
                setattr(part, name, 5)
        for name, value in settings.items():
            if "window" in name or "rope" in name or "position" in name:
                setattr(part, name, value)
    with torch.device("meta"):
        counted = model_class(small.described).from_config(copy.deepcopy(small.described))
    if (parameters := sum(p.numel() for p in counted.parameters())) > MOST_PARAMETERS:
        raise NoSmallCopyError(
            f"its smallest model has {parameters:,} parameters, and {MOST_PARAMETERS:,} are the limit"
        )
    model = small.model("eager")
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    transformers.AutoConfig.from_pretrained(folder / "model")  # settings by layer may name layers that were cut
    return folder / "model"


def examine(family: str, folder: Path) -> Verdict:
    """Train on and sample from a small model of the family, and compare."""
    try:
        path = make_folder(family, folder)
    except Exception as error:  # of the family's own code, or of its configuration's
        return Verdict("not built", "", _said(error))
    config = ModelConfig(path=str(path), dtype="float32")
    rollout = RolloutConfig(device="cpu", temperature=TEMPERATURE)
    settings = ModelSettings(config, LearnerConfig(device="cpu"), rollout, folder, 0, AlgorithmConfig())
    engine = TorchEngine(settings, OptimConfig(), 1)
    try:
        check_rotary(LONGEST, config, read_config(config))
        engine.prepare()
    except UserError as refusal:
        return Verdict("refused", "", _said(refusal))
    plain: Any = load_model(config, device=CPU, text_attention="eager")
    trains, why = _training(engine, plain)
    plain.eval()
    try:
        groups_queries = check_decoding(config)
    except UserError as refusal:
        return Verdict(trains, "refused", why or _said(refusal))
    samples, problem = _sampling(config, plain, groups_queries=groups_queries)
    return Verdict(trains, samples, problem or why)


def _groups(vocabulary: int) -> list[TrainGroup]:
    """A group of three completions, one of them long, and one of two: no image among them."""
    draw, row, groups = np.random.default_rng(1), 0, list[TrainGroup]()
    for prompt, lengths in ((6, (5, 24, 9)), (11, (3, 7))):
        completions: list[PackedTrajectory] = []
        for length in lengths:
            ids = draw.integers(10, vocabulary, length).astype(np.int32)
            completions.append(PackedTrajectory(row, ids, np.ones(length, bool)))
            row += 1
        ids = draw.integers(10, vocabulary, prompt).astype(np.int32)
        groups.append(TrainGroup(EncodedPrompt.of_text(ids), tuple(completions)))
    return groups


def _banned(model: Any) -> list[int]:
    """Placeholders of images and the like, which are never sampled."""
    return sorted(special_token_ids(model.config, PLACEHOLDER_ID_NAMES))


def _plain_logprobs(plain: Any, prompt: np.ndarray, completion: Sequence[int] | np.ndarray) -> torch.Tensor:
    """[T] of a completion, by one pass over its row."""
    ids = torch.from_numpy(np.concatenate([prompt, np.asarray(completion)])).long()
    logits = plain(input_ids=ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    logits = logits.float().index_fill(-1, torch.tensor(_banned(plain), dtype=torch.long), float("-inf"))
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]


def micro_batches(engine: TorchEngine, groups: Sequence[TrainGroup]) -> Iterator[MicroBatch]:
    """Micro-batches that the learner makes of the groups."""
    roles = Roles(engine)
    return roles.micro_batches(roles.plan(groups, 4096))


def _training(engine: TorchEngine, plain: Any) -> tuple[str, str]:
    """Log-probs and gradients of the learner's micro-batches."""
    groups = _groups(300)
    alone = {c.row: _plain_logprobs(plain, g.prompt.token_ids, c.token_ids) for g in groups for c in g.completions}
    weights = {
        row: torch.randn(len(values), generator=torch.Generator().manual_seed(row)) for row, values in alone.items()
    }
    torch.stack([(weights[row] * values).sum() for row, values in alone.items()]).sum().backward()
    wrong = ""
    for micro_batch in micro_batches(engine, groups):
        ours = engine.forward(micro_batch).logprobs
        places = list(zip(micro_batch.row.tolist(), micro_batch.column.tolist(), strict=True))
        theirs = torch.stack([alone[row][column] for row, column in places])
        difference = float((ours - theirs).detach().abs().max())
        if not difference <= SAME:
            wrong = f"log-probs differ by {difference:.3g} nats"
        engine.backward((ours * torch.stack([weights[row][column] for row, column in places])).sum())
    wanted = dict(plain.named_parameters())
    largest = max(float(p.grad.norm()) for p in wanted.values() if p.grad is not None)
    for name, parameter in engine.model.named_parameters():
        theirs = wanted[name].grad
        if theirs is None or wrong:
            continue
        ours = torch.zeros_like(theirs) if parameter.grad is None else parameter.grad
        difference = float((ours - theirs).norm()) / max(float(theirs.norm()), 1e-3 * largest)
        if not difference <= SAME_GRADIENT:
            wrong = f"the gradient of {name} differs by {difference:.3g} of its norm"
    if wrong:
        return "WRONG", wrong
    return ("packed", "") if engine.packs else ("alone", engine.obstacle)


@torch.no_grad()
def _sampling(config: ModelConfig, plain: Any, *, groups_queries: bool) -> tuple[str, str]:
    """Log-probs of what the hf engine's batch samples."""
    model = load_model(config, device=CPU, text_attention=family_of(config).attention).eval()
    batch = DecodeBatch(for_decoding(model, groups_queries=groups_queries), _banned(model), CPU)
    draw, rows = np.random.default_rng(2), []
    for number, length in enumerate((13, 5)):
        ids = draw.integers(10, 300, length).astype(np.int32)
        sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=8, stop_token_ids=())
        batch.join(batch.prefill([GenerationRequest(number, EncodedPrompt.of_text(ids), 2, number, sampling)], 0))
        rows = list(batch.rows)
        batch.step(0)
    while batch.rows:
        batch.step(0)
    difference = max(
        float(
            (_plain_logprobs(plain, row.request.prompt.token_ids, row.token_ids) - torch.tensor(row.logprobs))
            .abs()
            .max()
        )
        for row in rows
    )
    return ("hf", "") if difference <= SAME else ("WRONG", f"the engine's log-probs differ by {difference:.3g} nats")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def examine_apart(family: str) -> Verdict:
    """`examine` in a process with limits, whose folder goes with it, however it ends."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-family-", ignore_cleanup_errors=True) as folder:
        process = multiprocessing.get_context("fork").Process(target=_examine_within, args=(family, Path(folder)))
        process.start()
        try:
            process.join(DEADLINE_S)
        finally:
            ended = process.exitcode is not None
            process.kill()
            process.join()
        if not ended:
            return Verdict("crash", "", f"it took longer than {DEADLINE_S} s")
        written = Path(folder) / "verdict.json"
        if not written.exists():
            return Verdict("crash", "", f"its process ended with {process.exitcode}")
        return Verdict(**json.loads(written.read_text()))


def _examine_within(family: str, folder: Path) -> None:
    """The child: its verdict is a file, so that nothing waits for one that was killed."""
    torch.set_num_threads(1)  # a fork has none of its parent's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for kind, most in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_FSIZE, FILE)):
        resource.setrlimit(kind, (most, most))
    try:
        verdict = examine(family, folder)
    except Exception as error:
        verdict = Verdict("crash", "", _said(error))
    (folder / "verdict.json").write_text(json.dumps(asdict(verdict)))


def table(verdicts: Mapping[str, Verdict]) -> str:
    """Families of each verdict, as Markdown."""
    rows: dict[tuple[str, str], list[str]] = {}
    for family, verdict in verdicts.items():
        rows.setdefault((verdict.trains, verdict.samples), []).append(family)
    lines = ["| rows are trained | hf engine | families |", "|---|---|---|"]
    for (trains, samples), names in sorted(rows.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {trains} ({len(names)}) | {samples or '-'} | {', '.join(f'`{name}`' for name in names)} |")
    unbuilt = {name: one.why for name, one in verdicts.items() if one.trains == "not built"}
    large = [f"- `{name}`: {why}" for name, why in unbuilt.items() if re.search(r"[\d,]+ parameters", why)]
    return "\n".join([*lines, *(["", "Left out for their size:", "", *large] if large else [])]) + "\n"


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args(list(arguments) if arguments is not None else None)
    with contextlib.suppress(ImportError):  # else each child would import it with its first model, for seconds
        import_module("deepspeed")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # which removes the folder of the family at work
    verdicts: dict[str, Verdict] = {}
    for family in given.families or families():
        verdicts[family] = verdict = examine_apart(family)
        print(f"{family:32} {verdict.trains:10} {verdict.samples:8} {verdict.why[:300]}", flush=True)
    if given.write:
        wrong = sum(not {"WRONG", "crash"}.isdisjoint((one.trains, one.samples)) for one in verdicts.values())
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}, {date.today():%d %B %Y}"
        given.write.write_text(
            f"{HEADING}\n{versions}: {wrong} of {len(verdicts)} accepted and wrong or crashed.\n\n{table(verdicts)}"
        )


if __name__ == "__main__":
    main()
