"""The model folder, or its download from the hub, and the requirements on its files. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.plugins import description, implementation, installed
from asyncrl.user_functions import one_line

ADAPTER_CONFIG = "adapter_config.json"
"""File that a PEFT folder has."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_FILES = [*_SMALL_FILES, "*.safetensors"]
"""Files of a repository that are wanted: no weights in other formats, no code."""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def model_folder(config: ModelConfig, setting: str = "model.path") -> Path:
    """Return the folder of `model.path`; one of the hub is downloaded, or found in the cache, once per process.

    Raises UserError if it is not a Hugging Face model folder.
    """
    folder = Path(config.path)
    try:
        is_there = (folder / "config.json").is_file()
    except OSError as error:
        fix = "Make the folder and those above it readable (chmod), or start this as a user who may read them"
        raise UserError(f"{setting} is {config.path!r}: {error.strerror}. {fix}") from None
    if is_there:
        return folder
    if _HUB_NAME.fullmatch(config.path) and not folder.exists():
        return _download(config.path, setting, with_code=config.trust_remote_code)
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{setting} is {config.path!r}, a folder with an adapter only. Name its base model, or merge the two: "
            "asyncrl export RUN TARGET --merged"
        )
    astray = not folder.is_absolute() and not folder.is_dir()
    where = f", and no such folder in {Path.cwd()}" if astray else ""
    elsewhere = f" with {setting}=..., or start this in the folder in which the run was started" if astray else ""
    raise UserError(
        f"{setting} is {config.path!r}: there is no config.json in it{where}. "
        f"Name a Hugging Face model folder (config.json, *.safetensors, tokenizer and processor files){elsewhere}"
    )


def is_hub_name(path: str) -> bool:
    """True for `org/name` or `org/name@revision`, which a folder may have for its name, too."""
    return _HUB_NAME.fullmatch(path) is not None


def small_files(config: ModelConfig, setting: str = "model.path") -> Path:
    """`model_folder` of which only the small files are needed: of the hub, weights are not downloaded."""
    if is_hub_name(config.path) and not Path(config.path).exists():
        return _download(config.path, setting, with_code=config.trust_remote_code, files=tuple(_SMALL_FILES))
    return model_folder(config, setting)


@cache
def _download(name: str, setting: str, *, with_code: bool, files: tuple[str, ...] = tuple(_FILES)) -> Path:
    """Folder in the hub's cache with the small files and the safetensors of `org/name` or `org/name@revision`.

    HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and HF_TOKEN are heeded, as by every program that uses huggingface_hub.
    """
    from huggingface_hub import constants, snapshot_download

    repository, _, revision = name.partition("@")
    wanted = [*files, "*.py"] if with_code else [*files]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # of the hub's client, or of the HTTP library below it: not all have a base of their own
        fix = "Check name and network, and log in for a private or gated model (hf auth login, or HF_TOKEN)"
        if constants.HF_HUB_OFFLINE:
            fix = f"HF_HUB_OFFLINE forbids downloads: set it to 0, or run once where it is not set: hf download {name}"
        raise UserError(
            f"{setting} is {name!r}: there is no such folder in {Path.cwd()}, and the hub at {constants.ENDPOINT} "
            f"does not give it ({type(error).__name__}: {' '.join(str(error).split())[:200]}). {fix}"
        ) from None


def read_config(config: ModelConfig, setting: str = "model.path") -> dict[str, Any]:
    """The folder's config.json, whatever else is there. Raises UserError where its weights are quantised."""
    file = model_folder(config, setting) / "config.json"
    described = read_json(file)
    for part in ("text_config", "vision_config"):
        if not isinstance(described.get(part) or {}, dict):
            raise UserError(f"{part} in {file} is no mapping. Copy it from the original model again")
    _refuse_quantised(file.parent, described)
    return described


def text_part(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json, which for a plain language model is all of it."""
    return described.get("text_config") or described


def attention_heads(config: ModelConfig) -> int:
    """Number of the language model's attention heads; 0 where the folder does not say."""
    heads = text_part(read_config(config)).get("num_attention_heads") or 0
    return heads if isinstance(heads, int) else 0


def check_same_inputs(policy: ModelConfig, other: ModelConfig, setting: str) -> None:
    """Raise UserError unless the model of `other`, which `setting` names, reads what the policy's prompts are made of:
    it is of the same family and knows all token ids."""
    ours, theirs = read_config(policy), read_config(other, setting)
    keys = [key for key in ("model_type", "image_token_id", "video_token_id") if ours.get(key) != theirs.get(key)]
    problems = [f"{key} is {theirs.get(key)} there and {ours.get(key)} here" for key in keys]
    known, used = (text_part(described).get("vocab_size", 0) for described in (theirs, ours))
    if known < used:
        problems.append(f"vocab_size is {known} there and {used} here")
    if problems:
        raise UserError(
            f"{setting} is {other.path!r}, whose model cannot read what the one in {policy.path} reads: "
            f"{'; '.join(problems)}. Name a model of the same family"
        )


def describe_folder(config: ModelConfig) -> dict[str, Any]:
    """The folder's config.json. Raises UserError unless tokenizer, chat template and image processor are there, too."""
    folder = model_folder(config)
    described = read_config(config)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(
            f"{folder} has no tokenizer. Copy tokenizer.json and tokenizer_config.json from the original model into it"
        )
    if has_eyes(described) and not _has(folder, "preprocessor_config.json", key="image_processor"):
        raise UserError(
            f"{folder} has a vision model but no image processor. Copy preprocessor_config.json (or "
            "processor_config.json) from the original model into the folder"
        )
    in_tokenizer = "chat_template" in read_json(folder / "tokenizer_config.json", missing={})
    if not in_tokenizer and not _has(folder, *_TEMPLATE_FILES, key="chat_template"):
        raise UserError(
            f"{folder} has no chat template: prompts cannot be rendered. Copy chat_template.jinja (or a "
            "tokenizer_config.json that has one) from the original model, or of its instruction-tuned variant, into it"
        )
    return described


def describe_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """transformers' configuration of a folder. Its Auto classes know a plug-in's model family afterwards.

    Raises UserError for a family that transformers does not know.
    """
    from transformers import AutoConfig, __version__

    family = read_json(folder / "config.json").get("model_type")
    if family in installed("models") and (register := description("models", family).register):
        implementation(register)()
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as problem:  # transformers raises many kinds
        raise UserError(
            f"transformers {__version__} cannot read {folder / 'config.json'}, whose model_type is {family!r} "
            f"({one_line(problem)}). Copy it from the original model again. A family that transformers does not know "
            "needs another version of it, a plug-in's, or model.trust_remote_code=true where the folder brings its code"
        ) from problem


def _refuse_quantised(folder: Path, described: Mapping[str, Any]) -> None:
    """Raise UserError for quantised weights, which can be neither trained nor published."""
    found = described.get("quantization_config") or (described.get("text_config") or {}).get("quantization_config")
    if found:
        method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
        raise UserError(
            f"the weights in {folder} are quantised ({method}). Use the original model, in float32 or bfloat16; "
            "model.lora.rank=16 saves the memory of gradients and optimiser, model.quantization=nf4 that of the base"
        )


def has_eyes(described: Mapping[str, Any]) -> bool:
    """True if the folder's config.json has a vision part."""
    return described.get("vision_config") is not None


def _has(folder: Path, *files: str, key: str) -> bool:
    """True for a setting in a file of its own, or in processor_config.json."""
    return any((folder / name).is_file() for name in files) or key in read_json(
        folder / "processor_config.json", missing={}
    )


def read_json(file: Path, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if missing is not None and not file.is_file():
        return missing
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}. Copy it from the original model again") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no mapping. Copy it from the original model again")
    return value


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
THREADS = 4
"""Threads that compute checksums; xxhash releases the interpreter's lock."""


def check_weights(config: ModelConfig) -> None:
    """Raises UserError where a weight file is absent, cut off, or a git-lfs pointer. Only headers are read."""
    folder = model_folder(config)
    files = weight_files(folder)
    if not files:
        raise UserError(
            f"{folder} has no weights (*.safetensors). Copy them from the original model; what `git clone` without "
            "git-lfs leaves is not enough"
        )
    for file in files:
        if not file.is_file():
            why = "a link to nothing" if file.is_symlink() else f"named by {folder / INDEX} and not in the folder"
            raise UserError(f"{file} is {why}. Download it, too")
        try:
            with file.open("rb") as opened:
                is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
        except OSError as error:
            raise UserError(_unreadable(file, error)) from None
        if is_pointer:
            raise UserError(
                f"{file} is a git-lfs pointer of {file.stat().st_size} bytes, not the weights. Fetch them with "
                "`git lfs pull` in the model's repository, or download the file again"
            )
        if file.suffix == ".safetensors":
            with open_weights(file):
                pass


def base_fingerprint(config: ModelConfig) -> str:
    """Fingerprint of every tensor in the folder's *.safetensors, however they are sharded: name, dtype, shape, bytes.

    Reads the files once, at the speed of the disk or of memory; nothing is loaded.
    """
    folder = model_folder(config)
    files = [file for file in weight_files(folder) if file.suffix == ".safetensors"]
    if not files:
        raise UserError(
            f"{folder} has no model.safetensors, so its weights cannot be identified. Save the model again with "
            "save_pretrained of a current transformers"
        )
    with ThreadPoolExecutor(THREADS, thread_name_prefix="xxh3") as pool:
        described = [tensor for file in files for tensor in _described(file, pool)]
    return hashlib.sha256(json.dumps(sorted(described)).encode()).hexdigest()[:32]


def _described(file: Path, pool: ThreadPoolExecutor) -> list[tuple[str, str, list[int], str]]:
    """Name, dtype, shape and checksum of each tensor of a file."""
    import torch

    with open_weights(file, "pt") as opened:

        def describe(name: str) -> tuple[str, str, list[int], str]:
            part = opened.get_slice(name)
            flat = opened.get_tensor(name).reshape(-1).view(torch.uint8).numpy()
            return name, part.get_dtype(), part.get_shape(), xxhash.xxh3_128_hexdigest(flat)

        return list(pool.map(describe, opened.keys()))


def weight_files(folder: Path) -> list[Path]:
    """Files that transformers reads: the single one, else those that the index names, else what there is."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} is no index of weights ({type(error).__name__}: {error}). Download it again"
        ) from None


@contextmanager
def open_weights(file: Path, framework: str = "numpy") -> Iterator[Any]:
    """An open safetensors file. Raises UserError where its header and its length do not fit each other."""
    try:
        with safe_open(file, framework) as opened:
            yield opened
    except SafetensorError as error:
        raise UserError(
            f"{file} is cut off or damaged: it has {file.stat().st_size:,} bytes, and safetensors says: {error}. "
            "Download it again"
        ) from None
    except OSError as error:
        raise UserError(_unreadable(file, error)) from None


def _unreadable(file: Path, error: OSError) -> str:
    return f"cannot read {file}: {error.strerror or error}. Make it readable (chmod), or download it again"
