"""The end product of a run: its policy in a form that keeps it, and a record of how far that form is from the policy.

Engines sample an adapter beside its base. Merged it is another model wherever the base has 16 bits: rounding hides
small updates, and without rounding everything is computed in another dtype. So it is merged in fp32, by default only
where the base is fp32, and log-probs of a few hundred sampled tokens are compared. Likewise where an engine sampled
with weights of another precision than the policy's. What is merged is added to the base as it was in training.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.load import load_config
from asyncrl.config.parts import BASE_WEIGHTS
from asyncrl.config.sections import ModelConfig, Purpose
from asyncrl.data.dataset import open_train, open_validation
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.row_survey import PromptRows
from asyncrl.devices.device import resolve_dtype
from asyncrl.errors import UserError
from asyncrl.models.export import export_model, write_whole
from asyncrl.models.lora import is_adapter_folder, load_policy, merge
from asyncrl.plugins import implementation
from asyncrl.processing.encoded_prompt import media_arguments
from asyncrl.processing.processor import PromptProcessor, prompt_processor
from asyncrl.run_folder.contents import is_resumable
from asyncrl.run_folder.export_record import ExportRecord, write_record
from asyncrl.telemetry.recorder import CONFIG_FILE

ROWS, TOKENS = 8, 48
"""Prompts, and most tokens of a completion, whose log-probs are compared."""


def finish_export(
    model: ModelConfig,
    quantization: str,
    processor: PromptProcessor,
    prompts: Callable[[], Sequence[RenderedPrompt]],
    folder: Path,
    *,
    merged: bool | None = None,
) -> ExportRecord:
    """Merge the adapter in `folder` into its base where that is its form, compare it with the policy, and write the
    record. All of it on the CPU, one model at a time.

    `model` and `quantization` (`RolloutConfig.precision`) are those of the run; `merged` None merges into a base in
    fp32 that nobody rounded. `prompts`, of which ROWS are enough, are asked for where something is compared.
    """
    is_adapter, base = is_adapter_folder(folder), model.quantization
    is_rounded = quantization != base
    if merged is None:
        merged = is_adapter and model.dtype == "float32" and not (quantization or base)
    gap: float | None = None
    tokens = 0
    if merged or is_rounded:
        policy = load_policy(model, folder, quantization)
        sampled = SampledTokens(policy, processor, prompts()[:ROWS])
        exported = load_policy(model, folder, base) if is_rounded else policy
        del policy
        exported = merge(exported) if merged else exported
        gap, tokens = sampled.gap(exported), sampled.number
        if merged:
            export_model(exported, processor.processor, folder)
    record = ExportRecord(
        form="merged" if merged else "adapter" if is_adapter else "model",
        dtype="float32" if merged else model.dtype,
        policy_dtype=model.dtype,
        base=(f"{model.path} rounded to {base}" if base else model.path) if is_adapter else "",
        quantization=(quantization or model.dtype) if is_rounded else "",
        logprob_gap=gap,
        tokens=tokens,
    )
    if base and not merged:
        implementation(BASE_WEIGHTS[base].card)(model, folder)
    write_record(folder, record)
    return record


class SampledTokens:
    """Completions that a policy samples, and its log-probs of their tokens."""

    def __init__(self, policy: Any, processor: PromptProcessor, prompts: Sequence[RenderedPrompt]) -> None:
        self._inputs = _inputs(processor, prompts)
        self._stops = processor.ends.stop_token_ids
        self._tokens: torch.Tensor | None = None
        """[B, T] token ids"""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._tokens, self._logprobs = self._generate(policy)
        ends = torch.isin(self._tokens, torch.tensor(self._stops)).int()
        self._is_sampled = ends.cumsum(1) - ends == 0
        """[B, T] False behind the end of a completion."""

    @property
    def number(self) -> int:
        return int(self._is_sampled.sum())

    def gap(self, other: Any) -> float:
        """Mean absolute difference of another model's log-probs, in nats a token."""
        _, logprobs = self._generate(other)
        return float((logprobs - self._logprobs).abs()[self._is_sampled].mean())

    @torch.inference_mode()
    def _generate(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T] tokens, those that are there or else new ones, and the model's log-probs of them."""
        start, given = self._inputs["input_ids"].shape[1], self._tokens

        def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert given is not None
            return torch.full_like(scores, -torch.inf).scatter(1, given[:, ids.shape[1] - start, None], 0.0)

        found = model.eval().generate(
            # Engines give a model its pixels in its dtype, too.
            **{
                name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor
                for name, tensor in self._inputs.items()
            },
            max_new_tokens=TOKENS,
            eos_token_id=list(self._stops),
            pad_token_id=self._stops[0],
            logits_processor=[] if given is None else [force],
            **(
                {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
                if given is None
                else {"do_sample": False}
            ),
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = found.sequences[:, start:]
        steps = [step.float().log_softmax(-1) for step in found.logits]
        return tokens, torch.cat([step.gather(1, tokens[:, i, None]) for i, step in enumerate(steps)], 1)


def _inputs(processor: PromptProcessor, prompts: Sequence[RenderedPrompt]) -> Mapping[str, torch.Tensor]:
    """Arguments of a plain transformers model for these prompts, padded at their beginnings."""
    blobs = {digest: data for rendered in prompts for digest, data in rendered.blobs.items()}
    media = media_arguments([rendered.prompt for rendered in prompts], blobs) if processor.sees_images else {}
    processor.tokenizer.padding_side = "left"
    texts = [processor.render(rendered.prompt) for rendered in prompts]
    return processor.processor(text=texts, padding=True, return_tensors="pt", add_special_tokens=False, **media)


def export_policy(run_path: Path, source: Path, target: Path, *, merged: bool | None) -> str:
    """Write the policy in `source`, a folder of this run, to the new folder `target`, and say how.

    `merged`: the form of an adapter; None: as `finish_export` chooses.
    """
    if target.exists():
        raise UserError(f"{target} exists already. Name a new folder")
    if merged is not None and not is_adapter_folder(source):
        raise UserError(f"{run_path} trained the model itself: there is no adapter. Leave --adapter and --merged out")
    if not (run_path / CONFIG_FILE).is_file():
        shutil.copytree(source, target)
        return f"{target} is a copy of {source}"
    config = resolve_dtype(load_config(run_path / CONFIG_FILE, []))
    processor = prompt_processor(config.model, config.environment, config.data.chat_template_kwargs)
    supervised = not is_resumable(run_path)
    purpose: Purpose = "sft" if supervised else config.purpose

    def prompts() -> list[RenderedPrompt]:
        rows = open_validation(config.data, purpose) or open_train(config.data, purpose)
        return _usable(PromptRows(rows, config.data, processor, config.network.max_message_mib))

    def write(building: Path) -> None:
        shutil.copytree(source, building, dirs_exist_ok=True)
        processor.processor.save_pretrained(building)
        base = config.model.quantization
        quantization = base if supervised else config.rollout.precision(base)
        made.append(finish_export(config.model, quantization, processor, prompts, building, merged=merged))

    made: list[ExportRecord] = []
    write_whole(target, write)
    return f"{source} -> {target}: {made[0].describe()}"


def _usable(rows: PromptRows) -> list[RenderedPrompt]:
    """The first ROWS prompts of usable rows. Raises UserError where there is none."""
    found: list[RenderedPrompt] = []
    problem: UserError | None = None
    for index in range(len(rows.rows)):
        try:
            found.append(rows.measure(index)[0])
        except UserError as error:
            problem = error
        if len(found) == ROWS:
            break
    if not found and problem:
        raise problem
    return found
