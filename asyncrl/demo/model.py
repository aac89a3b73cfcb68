"""Build a small Qwen2-VL model with random weights, its tokenizer and its processor, and save one Hugging Face folder.

python -m asyncrl.demo.model --out model --seed 0
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Whole words of the task become single tokens; any other text falls back to bytes.
CORPUS = [
    "user\nassistant\nsystem\n",
    "What is the sum of the digits?",
    "What is the larger digit minus the smaller?",
    "What is the product of the digits?",
    "Which digits are these?",
    "read 0 1 2 3 4 5 6 7 8 9 answer 0 1 2 3 4 5 6 7 8 9",
    "answer 0123456789",
]
PATCH_SIZE = 7
MERGE_SIZE = 2


def build_tokenizer(words: str = "") -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a token of its own; those of `words`, too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d| ?\p{L}+| ?[^\s\d\p{L}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512 - len(SPECIAL_TOKENS),
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, *([words] if words else [])], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_processor(
    tokenizer: PreTrainedTokenizerFast, normalisation: tuple[float, float] | None = None
) -> Qwen2VLProcessor:
    """Build the processor; the smallest image is one that the task uses, so nothing is enlarged.

    `normalisation`: mean and standard deviation of pixels from 0 to 1; by default those of photographs (CLIP's).
    """
    unit = (PATCH_SIZE * MERGE_SIZE) ** 2
    options: dict[str, Any] = {
        "patch_size": PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "size": {"shortest_edge": 4 * unit, "longest_edge": 256 * unit},
    }
    if normalisation is not None:
        options |= {"image_mean": [normalisation[0]] * 3, "image_std": [normalisation[1]] * 3}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**options),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**options),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> Qwen2VLConfig:
    """Describe the model. Heads are 32 wide, the narrowest that vLLM's CPU attention takes."""
    head_dim = 32
    half = head_dim // 2
    side = half * 3 // 8
    text = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // head_dim,
        "num_key_value_heads": max(1, args.hidden // head_dim // 2),
        "max_position_embeddings": 2048,
        "initializer_range": args.init_std,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": args.rope_theta,
            "mrope_section": [half - 2 * side, side, side],
        },
    }
    vision = {
        "depth": args.vision_depth,
        "embed_dim": args.vision_dim,
        "hidden_size": args.hidden,
        "num_heads": args.vision_heads,
        "mlp_ratio": args.vision_mlp_ratio,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "initializer_range": args.init_std,
    }
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }.items()
    }
    make: Any = Qwen2VLConfig
    return make(
        text_config=text,
        vision_config=vision,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        **ids,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--intermediate", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vision-dim", type=int, default=128)
    parser.add_argument("--vision-depth", type=int, default=4)
    parser.add_argument("--vision-heads", type=int, default=4)
    parser.add_argument("--vision-mlp-ratio", type=int, default=2)
    parser.add_argument("--rope-theta", type=float, default=10000.0)
    parser.add_argument("--init-std", type=float, default=0.06)
    parser.add_argument("--words", default="", help="text whose words become tokens, beside those of the digit task")
    parser.add_argument(
        "--normalisation", type=float, nargs=2, metavar=("MEAN", "STD"), help="of pixels; default: of photographs"
    )
    args = parser.parse_args(argv)

    tokenizer = build_tokenizer(args.words)
    torch.manual_seed(args.seed)
    model = Qwen2VLForConditionalGeneration(build_config(tokenizer, args)).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(args.out)
    build_processor(tokenizer, args.normalisation and tuple(args.normalisation)).save_pretrained(args.out)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.out}: {count / 1e6:.2f}M parameters, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    main()
