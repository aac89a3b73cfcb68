"""The answer to a `hello`, as pure functions: welcome or refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.errors import ErrorCode
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, Refusal


def check_hello(
    hello: Hello,
    *,
    model_fingerprint: str,
    processor_fingerprint: str,
    base_fingerprint: str = "",
    quantization: str = "",
    live_server_ids: Mapping[str, str],
) -> Refusal | None:
    """Refuse a server that does not fit a learner of these fingerprints; None if it fits.

    `live_server_ids` maps the id of each welcomed, living server to its session: the same session again is a
    reconnection and fine, another session is a second process that took the id.
    """
    server = f"server {hello.server_id!r}"
    if hello.protocol_major != PROTOCOL_MAJOR:
        return refuse_other_protocol(hello.model_dump())
    if hello.model_fingerprint != model_fingerprint:
        return Refusal(
            code=ErrorCode.MODEL_MISMATCH,
            reason=f"{server} loaded a model with fingerprint {hello.model_fingerprint}, "
            f"the learner's is {model_fingerprint}: parameter names, shapes or dtypes differ",
            fix="Start both with the same resolved configuration: the same model path, revision, dtype and model.lora; "
            "name model.dtype where it is auto and not every machine has a GPU",
        )
    if hello.base_fingerprint != base_fingerprint:
        return Refusal(
            code=ErrorCode.MODEL_MISMATCH,
            reason=f"{server} holds base weights with fingerprint {hello.base_fingerprint or 'unknown'}, the learner's "
            f"are {base_fingerprint or 'published whole'}: an adapter on another base is another policy",
            fix="Copy the learner's model folder (its *.safetensors files) to the server, and start it again",
        )
    if hello.quantization != quantization:
        return Refusal(
            code=ErrorCode.MODEL_MISMATCH,
            reason=f"{server} samples with weights of rollout.quantization={hello.quantization!r}, the learner "
            f"expects {quantization!r}: its check of log-probs and its correction are for that",
            fix="Start both with the same rollout.quantization",
        )
    if hello.processor_fingerprint != processor_fingerprint:
        return Refusal(
            code=ErrorCode.PROCESSOR_MISMATCH,
            reason=f"{server} has a processor with fingerprint {hello.processor_fingerprint}, "
            f"the learner's is {processor_fingerprint}: tokenizer, image processor or chat template differ",
            fix="Use the same model files, model.min_pixels, model.max_pixels and transformers version on both sides",
        )
    session = live_server_ids.get(hello.server_id)
    if session is not None and session != hello.session:
        return Refusal(
            code=ErrorCode.DUPLICATE_SERVER,
            # The living one's session is not told: with it this one could pass for a reconnection.
            reason=f"{server} is already connected; this one has session {hello.session} (pid {hello.pid})",
            fix="Give each rollout server an id of its own; after a crash wait until the old one is gone",
        )
    return None


def check_mode(hello: Hello, mode: str, tenant: Hello | None) -> Refusal | None:
    """Refuse a server of another trainer.mode, or a second one beside the living `tenant`; None if it fits."""
    server = f"server {hello.server_id!r}"
    if hello.mode != mode:
        return Refusal(
            code=ErrorCode.MODE_MISMATCH,
            reason=f"{server} runs in {hello.mode} mode, the learner in {mode} mode: they would use one device at "
            "once, or wait for each other for ever",
            fix="Start both with the same trainer.mode",
        )
    if mode == "sync" and tenant is not None:
        return Refusal(
            code=ErrorCode.DUPLICATE_SERVER,
            reason=f"{server} is the second one: in sync mode the learner shares its device with one, which is "
            f"{tenant.server_id!r}",
            fix="Stop one of them, or train with trainer.mode=async",
        )
    return None


def refuse_other_protocol(header: Mapping[str, Any]) -> Refusal | None:
    """Refuse a hello of another protocol major, whose other fields may not fit our model of it.

    None if `header` is anything else.
    """
    major, minor = header.get("protocol_major"), header.get("protocol_minor")
    if header.get("type") != "hello" or not isinstance(major, int) or major == PROTOCOL_MAJOR:
        return None
    server = f"server {str(header.get('server_id'))[:200]!r}"
    older = "server" if major < PROTOCOL_MAJOR else "learner"
    return Refusal(
        code=ErrorCode.PROTOCOL_VERSION,
        reason=f"{server} speaks protocol {major}.{minor if isinstance(minor, int) else 0}, the learner speaks "
        f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
        fix=f"Upgrade the {older}: both sides need the same major protocol version",
    )
