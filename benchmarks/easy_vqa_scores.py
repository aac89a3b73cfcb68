"""Greedy completions of a policy for many questions about the same pictures, and their scores.

    python -m benchmarks.easy_vqa_scores CONFIG --model FOLDER --rows FILE.parquet --out FILE.jsonl

Completions are those of `asyncrl eval`, at about half of its cost. The beginning of a prompt, which ends with the
picture, is computed once for all questions about it. A completion is guessed whole and checked in one pass; a wrong
guess is mended at its first wrong token and checked again, so that guesses decide about time alone. Passes are in
bfloat16, twice as fast; a row where a token leads another by less than MARGIN there is checked in float32.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.held_out import held_out_prompts
from asyncrl.devices.device import compute_in_full_float32, resolve_dtype
from asyncrl.launch.command import command
from asyncrl.models.loading import model_of_export
from asyncrl.models.lora import is_adapter_folder, load_policy
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.demos.reward import right, seen

BATCH = 64
MARGIN = 1.5
"""Logits: far more than bfloat16 changes the difference of two."""
UNKNOWN = "red? red. Answer: yes"
"""Guess for a question that no row demonstrates."""


class GreedyPolicy:
    """A policy in float32 on the CPU, and the beginnings of prompts that it has read."""

    def __init__(self, config: RunConfig, folder: Path):
        compute_in_full_float32()
        model = config.model
        if not is_adapter_folder(folder):
            model = model_of_export(model, folder).model_copy(update={"path": str(folder)})
        self.processor = PromptProcessor(model, config.data.chat_template_kwargs)
        self.model = load_policy(model, folder).eval()
        self._most = config.data.max_response_length
        self._ends = self.processor.ends.stop_token_ids
        self._rough = deepcopy(self.model).bfloat16()
        self._layers: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Keys and values [pictures, heads, tokens of a beginning, width] of each layer, by whether they are rough."""

    @torch.inference_mode()
    def complete(self, rows: Sequence[RenderedPrompt], guesses: Sequence[str]) -> list[str]:
        """Greedy completion of each row. Rows with the same picture and question are computed once."""
        asked: dict[tuple[bytes, tuple[str, ...]], int] = {}
        prompts, questions, pictures, guess = [], [], {}, []
        places = []
        for row, text in zip(rows, guesses, strict=True):
            prompt = self.processor.encode(row.prompt, row.blobs)
            place = asked.setdefault((prompt.token_ids.tobytes(), prompt.image_hashes), len(asked))
            places.append(place)
            if place < len(prompts):
                continue
            end = 1 + max((at for at, kind in enumerate(prompt.token_types) if kind), default=-1)
            pictures.setdefault(prompt.image_hashes, (len(pictures), prompt, end))
            prompts.append(pictures[prompt.image_hashes][0])
            questions.append(prompt.token_ids[end:].tolist())
            guess.append(self.processor.tokenize_completion(text)[: self._most])
        self._read([(prompt.token_ids[:end], prompt.pixel_values) for _, prompt, end in pictures.values()])
        doubtful = self._settle(range(len(guess)), prompts, questions, guess, rough=True)
        self._settle(doubtful, prompts, questions, guess, rough=False)
        texts = self.processor.tokenizer.batch_decode(guess, skip_special_tokens=True)
        return [texts[place] for place in places]

    def _settle(
        self,
        rows: Sequence[int],
        pictures: Sequence[int],
        questions: Sequence[list[int]],
        guess: list[list[int]],
        *,
        rough: bool,
    ) -> list[int]:
        """Check and mend guesses of rows until they are right. Returns those that a rough pass cannot tell."""
        left, doubtful = list(rows), list[int]()
        while left:
            by_length: dict[int, list[int]] = defaultdict(list)
            for row in left:
                by_length[len(questions[row])].append(row)
            left = []
            for same in by_length.values():
                same.sort(key=lambda row: len(guess[row]))
                for batch in (same[at : at + BATCH] for at in range(0, len(same), BATCH)):
                    again, unclear = self._check(batch, [pictures[row] for row in batch], questions, guess, rough)
                    left += again
                    doubtful += unclear
        return doubtful

    def _read(self, beginnings: Sequence[tuple[Any, torch.Tensor | None]]) -> None:
        """Keep keys and values of the beginnings; nothing where prompts have no picture."""
        for rough in (True, False):
            model = self._rough if rough else self.model
            found = []
            for at in range(0, len(beginnings), BATCH):
                part = [(ids, pixels) for ids, pixels in beginnings[at : at + BATCH] if pixels is not None]
                if part:
                    ids = torch.tensor([one.tolist() for one, _ in part])
                    pixels = torch.cat([pixels for _, pixels in part]).to(model.dtype)
                    cache = model(input_ids=ids, pixel_values=pixels, use_cache=True, logits_to_keep=1).past_key_values
                    found.append([(layer.keys, layer.values) for layer in cache.layers])
            self._layers[rough] = [
                (torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts]))
                for parts in zip(*found, strict=True)
            ]

    def _check(
        self,
        batch: Sequence[int],
        pictures: Sequence[int],
        questions: Sequence[list[int]],
        guess: list[list[int]],
        rough: bool,
    ) -> tuple[list[int], list[int]]:
        """Check the guesses of a batch, whose questions are equally long, and mend wrong ones.

        Returns their rows, and those that a rough pass cannot tell."""
        from transformers import DynamicCache

        width = max(len(guess[row]) for row in batch)
        ids = torch.zeros(len(batch), len(questions[batch[0]]) + width - 1, dtype=torch.long)
        for place, row in enumerate(batch):
            words = [*questions[row], *guess[row][:-1]]
            ids[place, : len(words)] = torch.tensor(words)
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self._layers[rough]):
            cache.update(keys[list(pictures)], values[list(pictures)], layer)
        # Padding is behind the words, where causal attention does not look.
        model = self._rough if rough else self.model
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=width).logits.float()
        logits[..., list(self.processor.placeholder_ids)] = -torch.inf
        best = logits.topk(2, dim=-1)
        leads = (best.values[..., 0] - best.values[..., 1]).tolist()
        again, unclear = [], []
        for row, said, lead in zip(batch, best.indices[..., 0].tolist(), leads, strict=True):
            right, is_whole = mended(guess[row], said, self._ends, self._most)
            pairs = enumerate(zip(guess[row], right, strict=False))
            last = next((at for at, (mine, theirs) in pairs if mine != theirs), len(right) - 1)
            if rough and min(lead[: last + 1]) < MARGIN:
                unclear.append(row)
                continue
            guess[row] = right
            again += [] if is_whole else [row]
        return again, unclear


def mended(guess: Sequence[int], said: Sequence[int], ends: Sequence[int], most: int) -> tuple[list[int], bool]:
    """A guess with its first wrong token put right, and whether it is the greedy completion now.

    `said[i]`: greedy token behind `guess[:i]`. `most`: tokens of the longest completion."""
    at = next((at for at, token in enumerate(guess) if said[at] != token), None)
    if at is None:
        return [*guess], True
    right_so_far = [*guess[:at], said[at]]
    if said[at] in ends or len(right_so_far) == most:
        return right_so_far, True
    return right_so_far + ([*guess[at + 1 :]] or [ends[0]]), False


def score(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """Each row of `data.val_files` with the policy's greedy completion, and whether it is right."""
    policy = GreedyPolicy(resolve_dtype(config), folder)
    rows = list(held_out_prompts(config.data, policy.processor, config.network.max_message_mib)[1])
    shown = {(_question(row), row.prompt.answer): row.target for row in rows if row.target}
    guesses = [row.target or shown.get((_question(row), row.prompt.answer), UNKNOWN) for row in rows]
    found = []
    for row, completion in zip(rows, policy.complete(rows, guesses), strict=True):
        answer, columns = row.prompt.answer, dict(row.prompt.columns)
        sample = RewardSample(completion, answer=answer, columns=columns)
        told = {name: columns[name] for name in ("picture", "kind")}
        told |= {"question": _question(row), "answer": answer, "completion": completion}
        read = bool(seen(sample)) if columns["colour"] else None
        found.append({**told, "right": bool(right(sample)), "seen": read})
    return found


def _question(row: RenderedPrompt) -> str:
    return "".join(part.text for message in row.prompt.messages for part in message.content if part.type == "text")


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder, or a PEFT folder")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = load_config(arguments.config, [f"data.val_files=[{arguments.rows}]"])
    found = score(config, arguments.model)
    lines = "".join(f"{json.dumps(line)}\n" for line in found)
    arguments.out.write_text(lines, encoding="utf-8")
    print(f"{sum(line['right'] for line in found)} of {len(found)} right")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
