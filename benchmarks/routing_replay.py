"""Experts of a model of experts that the `hf` engine chose, chosen again in the learner (R3, arXiv 2510.11370).

`python -m benchmarks.routing_replay` samples completions with small random models in 16 bits, and prints how far the
learner's log-probs are from the engine's when each side chooses experts for itself, and when the learner takes the
engine's. Weights of the chosen experts are the learner's own in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers

from asyncrl.attention.shared_prefix import SHARED_PREFIX_ATTENTION, register
from asyncrl.models.output_head import hidden_states, scaled_logits
from asyncrl.processing.encoded_prompt import EncodedPrompt
from learner.training.packing import PackedTrajectory, TrainGroup, build_micro_batch
from protocol.messages import Sampling
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch

CPU = torch.device("cpu")
PROMPT, ROWS, TOKENS = 24, 16, 48
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
Chosen = list[torch.Tensor]
"""Experts of each layer, [tokens, experts per token]."""


def model_of(seed: int, dtype: torch.dtype, attention: str) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(**SIZES)
    model = transformers.Qwen3MoeForCausalLM._from_config(config, attn_implementation=attention).to(dtype)
    return model.eval()


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextmanager
def hooked(model: Any, of_layer: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
    handles = [router.register_forward_hook(of_layer(layer)) for layer, router in enumerate(routers(model))]
    yield
    for handle in handles:
        handle.remove()


@torch.inference_mode()
def sampled(model: Any, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Chosen]:
    """Prompt [P], tokens and log-probs [rows, T], and the experts of the prompt and then of each row's inputs."""
    prompt = np.random.default_rng(seed).integers(1, SIZES["vocab_size"], PROMPT).astype(np.int32)
    seen: dict[int, list[torch.Tensor]] = defaultdict(list)

    def record(layer: int) -> Callable[..., Any]:
        return lambda _, __, output: seen[layer].append(output[2].clone())

    batch = DecodeBatch(model, (), CPU)
    sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS, stop_token_ids=())
    with hooked(model, record):
        batch.join(batch.prefill([GenerationRequest(0, EncodedPrompt.of_text(prompt), ROWS, seed, sampling)], 0))
        rows = list(batch.rows)
        while batch.rows:
            batch.step(0)
    chosen = [torch.cat([parts[0], torch.stack(parts[1:], 1).flatten(0, 1)]) for _, parts in sorted(seen.items())]
    ids = np.asarray([row.token_ids for row in rows], np.int32)
    return prompt, ids, np.asarray([row.logprobs for row in rows]), chosen


@torch.inference_mode()
def learned(model: Any, prompt: np.ndarray, ids: np.ndarray, taken: Chosen | None) -> tuple[np.ndarray, Chosen]:
    """Log-probs [rows, T] of one packed pass, and the experts that it would choose; it takes those of `taken`."""
    own: Chosen = []

    def choose(layer: int) -> Callable[..., Any]:
        def hook(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            logits, _, indices = output
            own.append(indices)
            if taken is None:
                return None
            weights = logits.float().softmax(-1).gather(1, taken[layer])
            return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), taken[layer]

        return hook

    rows = tuple(PackedTrajectory(row, tokens, np.ones(len(tokens), bool)) for row, tokens in enumerate(ids))
    packed = build_micro_batch(model, [TrainGroup(EncodedPrompt.of_text(prompt), rows)], CPU)
    with hooked(model, choose):
        states = hidden_states(model, packed.inputs)[packed.predict_from]
    logprobs = scaled_logits(model, states).float().log_softmax(-1).gather(1, packed.targets[:, None])
    return logprobs.view(ids.shape).numpy(), own


def main() -> None:
    register()
    print("| engine | learner | experts | other experts | mean | largest | over 0.1 | KL |\n" + "|---" * 8 + "|")
    for engine, learner in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
        found: dict[str, list[np.ndarray]] = defaultdict(list)
        flipped: list[float] = []
        for seed in range(3):
            prompt, ids, theirs, chosen = sampled(model_of(seed, engine, "sdpa"), seed)
            source = model_of(seed, engine, SHARED_PREFIX_ATTENTION).to(learner)  # weights that are published
            for name, taken in (("own", None), ("engine's", chosen)):
                ours, own = learned(source, prompt, ids, taken)
                found[name].append(ours - theirs)
                if taken is None:
                    pairs = zip(own, chosen, strict=True)
                    same = [(a.sort(-1).values == b.sort(-1).values).all(-1).float().mean() for a, b in pairs]
                    flipped.append(1 - float(torch.stack(same).mean()))
        for name, parts in found.items():
            gap = np.concatenate(parts).ravel()
            kl = float((np.exp(gap) - 1 - gap).mean())
            far = float((np.abs(gap) > 0.1).mean())
            other = f"{np.mean(flipped):.1%}" if name == "own" else "-"
            sizes = f"{np.abs(gap).mean():.4f} | {np.abs(gap).max():.3f} | {far:.2%} | {kl:.1e}"
            print(f"| {engine} | {learner} | {name} | {other} | {sizes} |".replace("torch.", ""), flush=True)


if __name__ == "__main__":
    main()
