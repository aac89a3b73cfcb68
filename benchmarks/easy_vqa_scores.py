"""Greedy completions of a policy for many questions about the same pictures, and their scores.

    python -m benchmarks.easy_vqa_scores CONFIG --model FOLDER --rows FILE.parquet --out FILE.jsonl

Completions are those of `asyncrl eval`, at about half of its cost. The beginning of a prompt, which ends with the
picture, is computed once for all questions about it. A completion is guessed whole and checked in one pass in bfloat16.
A row whose guess is wrong, or where a token leads another by less than MARGIN, is decoded token by token in float32.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
"""Logits. With it no completion of 1,500 rows of the start differed from float32's."""
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
        others = set(range(len(guess)))
        for batch in _batches(others, questions):
            others -= set(self._agreed(batch, [prompts[row] for row in batch], questions, guess))
        for batch in _batches(others, questions):
            found = self._decode([prompts[row] for row in batch], [questions[row] for row in batch])
            for row, completion in zip(batch, found, strict=True):
                guess[row] = completion
        texts = self.processor.tokenizer.batch_decode(guess, skip_special_tokens=True)
        return [texts[place] for place in places]

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

    def _cache(self, pictures: Sequence[int], *, rough: bool) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self._layers[rough]):
            cache.update(keys[list(pictures)], values[list(pictures)], layer)
        return cache

    def _agreed(
        self, batch: Sequence[int], pictures: Sequence[int], questions: Sequence[list[int]], guess: Sequence[list[int]]
    ) -> list[int]:
        """Rows of a batch, whose questions are equally long, where each token of the guess leads all others clearly."""
        width = max(len(guess[row]) for row in batch)
        ids = torch.zeros(len(batch), len(questions[batch[0]]) + width - 1, dtype=torch.long)
        guessed = torch.zeros(len(batch), width, dtype=torch.long)
        behind = torch.ones(len(batch), width, dtype=torch.bool)
        for place, row in enumerate(batch):
            words = [*questions[row], *guess[row][:-1]]
            ids[place, : len(words)] = torch.tensor(words)
            guessed[place, : len(guess[row])] = torch.tensor(guess[row])
            behind[place, : len(guess[row])] = False
        cache = self._cache(pictures, rough=True)
        # Padding is behind the words, where causal attention does not look.
        output = self._rough(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=width)
        best = self._allowed(output.logits).topk(2, dim=-1)
        leads = best.values[..., 0] - best.values[..., 1]
        clear = ((best.indices[..., 0] == guessed) & (leads >= MARGIN)) | behind
        return [row for row, is_clear in zip(batch, clear.all(1).tolist(), strict=True) if is_clear]

    def _decode(self, pictures: Sequence[int], questions: Sequence[list[int]]) -> list[list[int]]:
        """Greedy completions of equally long questions, in float32."""
        cache = self._cache(pictures, rough=False)
        ids = torch.tensor(questions)
        found: list[list[int]] = [[] for _ in questions]
        for _ in range(self._most):
            output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = self._allowed(output.logits).argmax(-1)
            going_on = [not (words and words[-1] in self._ends) for words in found]
            if not any(going_on):
                break
            for words, token, goes_on in zip(found, ids[:, 0].tolist(), going_on, strict=True):
                words += [token] * goes_on
        return found

    def _allowed(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        logits[..., list(self.processor.placeholder_ids)] = -torch.inf
        return logits


def _batches(rows: Iterable[int], questions: Sequence[list[int]]) -> Iterator[list[int]]:
    """Rows with questions of one length, at most BATCH at once."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for row in sorted(rows):
        by_length[len(questions[row])].append(row)
    for same in by_length.values():
        yield from (same[at : at + BATCH] for at in range(0, len(same), BATCH))


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
