"""Process of a learned reward model, `python -m asyncrl_plugins.judges.reward_model`: scores of a sequence classifier.

Prompt and completion are one conversation in the model's own chat template. Samples that wait are computed together.
Images stand as `<image>` in the text: classifiers here read text only.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import samples_of, scores_of
from asyncrl.user_functions import one_line
from asyncrl.workers.channel import Channel, Serve, run_worker
from asyncrl_plugins.judges.reward_model_settings import RewardModelSettings


class RewardModel:
    def __init__(self, settings: RewardModelSettings) -> None:
        """Load the model. Raises UserError."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from asyncrl.checks.inputs import rotary_changes
        from asyncrl.devices.device import compute_in_full_float32, resolve_device
        from asyncrl.model_files.folder import describe_model, model_folder
        from asyncrl.models.loading import attention_of_parts
        from asyncrl.models.small_copy import family_of

        torch.set_num_threads(settings.cpu_threads)
        compute_in_full_float32()
        self._settings = settings
        self._device = resolve_device(settings.device, "kwargs.device of the reward model")
        folder = model_folder(settings.model)
        code = {"trust_remote_code": settings.trust_remote_code}
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, **code)
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._tokenizer.padding_side = "right"
        auto = "float32" if self._device.type == "cpu" else "bfloat16"
        dtype = getattr(torch, auto if settings.dtype == "auto" else settings.dtype)
        described = describe_model(folder, **code)
        # PyTorch's attention has no caps on scores, as Gemma 2 has: a classifier's scores would be others.
        attention = attention_of_parts(described, family_of(settings.model).attention)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, output_loading_info=True, **code
        )
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise UserError(f"{folder} has no weights for {missing}: its scores would be noise. Is it a reward model?")
        self._model: Any = model.to(self._device).eval()
        self._model.config.pad_token_id = self._tokenizer.pad_token_id  # where a sequence ends
        text = self._model.config.get_text_config()
        longest: int = settings.max_length or getattr(text, "max_position_embeddings", None) or 1 << 30
        # A row over the length at which rotary frequencies change would change the scores of its batch.
        self._longest = min([longest, *(until for _, until in rotary_changes(described.to_dict()))])

    def encode(self, sample: RewardSample) -> list[int]:
        """Token ids of the conversation. Raises ValueError where it is too long, jinja2's errors where the template
        refuses it."""
        messages = [*sample.messages, {"role": "assistant", "content": sample.completion}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > self._longest:
            raise ValueError(f"prompt and completion have {len(ids)} tokens, and the model takes {self._longest}")
        return ids

    def scores(self, rows: Sequence[list[int]]) -> list[float | None]:
        """Scores of token sequences; None where the device's memory does not suffice even for one alone."""
        import torch

        from asyncrl.devices.device import free_caches, is_out_of_memory

        try:
            with torch.inference_mode():
                padded = self._tokenizer.pad({"input_ids": list(rows)}, return_tensors="pt").to(self._device)
                logits = self._model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits
                label = self._settings.label
                chosen = logits[:, 0] if label is None else logits.float().softmax(-1)[:, label]
                return chosen.float().tolist()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_caches(self._device)
        if len(rows) == 1:
            return [None]
        half = len(rows) // 2
        return [*self.scores(rows[:half]), *self.scores(rows[half:])]


def _answers(model: RewardModel, name: str, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The replies to some requests, of one completion each, computed in one batch."""
    started, where = time.perf_counter(), f"reward component {name!r}"
    found = [scores_of(request)[0] for request in requests]
    encoded: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        try:
            encoded[i] = model.encode(samples_of(request)[0])
        except Exception as error:  # of this sample alone
            found[i] = found[i].failed("reward_exception", f"{where}: {one_line(error)}")
    for i, value in zip(encoded, model.scores(list(encoded.values())) if encoded else [], strict=True):
        if value is None:
            found[i] = found[i].failed(
                "reward_memory", f"{where}: no memory for {len(encoded[i])} tokens on its device"
            )
        elif not math.isfinite(value):
            found[i] = found[i].failed("reward_nan", f"{where}: the model's score is {value}")
        else:
            found[i] = found[i].plus(name, value)
    seconds = time.perf_counter() - started
    ids = [request["id"] for request in requests]
    return [{"id": id, "seconds": seconds, "scores": [vars(score)]} for id, score in zip(ids, found, strict=True)]


def _load(setup: dict[str, Any]) -> tuple[dict[str, Any], Serve]:
    settings, name = RewardModelSettings(**setup["settings"]), setup["name"]
    try:
        model = RewardModel(settings)
    except UserError as error:
        raise UserError(f"reward {name}: {error}") from error
    return {}, lambda channel: _serve(model, name, settings.batch, channel)


def _serve(model: RewardModel, name: str, largest_batch: int, channel: Channel) -> None:
    waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for message in channel:
            waiting.put(message)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (request := waiting.get()) is not None:
        batch = [request]
        while len(batch) < largest_batch and not waiting.empty():
            more = waiting.get()
            if more is None:
                return
            batch.append(more)
        for reply in _answers(model, name, batch):
            channel.send(reply)


if __name__ == "__main__":
    run_worker(_load)
