"""Our requests as bodies of SGLang's `/generate`, and its answers as our columns, checked."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from asyncrl.errors import BadStateError, UserError
from protocol.messages import FinishReason
from rollout_server.engines.base import Completion, GenerationRequest, version_column

BANNED = -1e9
"""Logit bias of a token that must not be sampled: its probability is 0 in every dtype. JSON has no infinity."""
ABORTED = "abort"
"""SGLang's finish reason of what was interrupted."""
COLDEST = 1e-6
"""Below this temperature SGLang takes the most probable token without a word."""


def check_request(request: GenerationRequest, placeholders: Sequence[int], max_tokens: int) -> None:
    """Raises UserError for what this engine, which has room for `max_tokens`, cannot honour."""
    sampling, row = request.sampling, request.prompt.row_id
    if request.prompt.videos:
        raise UserError(f"row {row} has videos, which the sglang engine does not take. Set rollout.engine=vllm or hf")
    if 0 < sampling.temperature < COLDEST:
        raise UserError(
            f"the temperature of ticket {request.request_id} is {sampling.temperature:g}, and SGLang is greedy below "
            f"{COLDEST:g}. Set a higher one"
        )
    if sampling.truncates and sampling.temperature:
        raise UserError(
            f"ticket {request.request_id} has top_p {sampling.top_p:g}, top_k {sampling.top_k} and min_p "
            f"{sampling.min_p:g}, and SGLang's log-probs are of the distribution before it is cut off. Leave them out, "
            "or set rollout.engine=vllm"
        )
    unbanned = set(placeholders) - set(sampling.banned_token_ids)
    if unbanned:
        raise UserError(
            f"ticket {request.request_id} allows image placeholder ids {sorted(unbanned)} to be sampled. "
            "A completion with one of them cannot be trained; ban them in the ticket's sampling"
        )
    length = len(request.prompt.token_ids)
    if length + sampling.max_new_tokens > max_tokens:
        raise UserError(
            f"row {row}: {length} prompt tokens and up to {sampling.max_new_tokens} new ones are more than the "
            f"{max_tokens} that SGLang was started for. Raise data.max_prompt_length or data.max_response_length on "
            "this server"
        )


def generate_body(request: GenerationRequest, index: int, rid: str) -> dict[str, Any]:
    """Body of `/generate` for the group's completion `index`.

    Its images have one placeholder each, which SGLang expands: expanded ones make it wait for ever. Log-probs of greedy
    decoding are those of temperature 1, as the protocol has it.
    """
    sampling, seen = request.sampling_of(index), request.seen_by(index)
    ids = seen.token_ids if seen.unexpanded_ids is None else seen.unexpanded_ids
    # Heeded with --enable-deterministic-inference alone, which SGLang does not offer on a CPU.
    seed: Any = np.random.SeedSequence(request.seed_of(index)).generate_state(1, np.uint64)
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": [*ids.tolist(), *request.prefix(index)],
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": sampling.max_new_tokens - len(request.prefix(index)),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": not sampling.stop_token_ids,  # it would ignore the ticket's ids, too
            "skip_special_tokens": False,
            "logit_bias": {str(token): BANNED for token in sampling.banned_token_ids},
            "sampling_seed": int(seed[0]) >> 1,
        },
        "return_logprob": True,
        "return_prompt_token_ids": True,
    }
    if seen.images:
        body["image_data"] = [base64.b64encode(image).decode() for image in seen.images]
    return body


def to_completion(
    request: GenerationRequest,
    index: int,
    answer: Mapping[str, Any],
    submitted_version: int,
    *,
    was_interrupted: bool = False,
) -> Completion:
    """An answer, finished or interrupted, behind its prefix, which was put there at the `submitted_version`.

    Raises UserError where SGLang saw another prompt than the learner, and BadStateError for an incomplete answer.
    """
    prefix, meta = request.prefix(index), answer["meta_info"]
    check_prompt(request, index, answer["prompt_token_ids"])
    reason = (meta["finish_reason"] or {}).get("type")
    is_open = was_interrupted and reason == ABORTED
    if not is_open and reason not in ("stop", "length"):
        raise BadStateError(f"SGLang ended ticket {request.request_id} with {meta['finish_reason']}")
    sampled, places = answer["output_ids"], meta["output_token_logprobs"]
    if reason == "stop" and sampled[-1] not in request.sampling.stop_token_ids:
        raise UserError(
            f"SGLang ended ticket {request.request_id} at the id {sampled[-1]}, an end of text by the model folder "
            "(config.json, generation_config.json, tokenizer), and the ticket ends at "
            f"{request.sampling.stop_token_ids}. Correct eos_token_id there, or set rollout.engine=vllm"
        )
    if [token for _, token, _ in places] != sampled:
        raise BadStateError(
            f"SGLang returned log-probs of {len(places)} tokens for {len(sampled)} sampled ones of ticket "
            f"{request.request_id}: they are not of the same tokens"
        )
    spans = [(int(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]]
    versions = version_column(spans, len(sampled), "SGLang")
    return Completion(
        request_id=request.request_id,
        index=index,
        token_ids=np.asarray([*prefix, *sampled], np.int32),
        logprobs=np.asarray([*[0.0] * len(prefix), *(logprob for logprob, _, _ in places)], np.float32),
        versions=np.concatenate([np.full(len(prefix), submitted_version, np.int32), versions]),
        finish_reason=None if is_open else FinishReason(reason),
        stream=request.stream,
    )


def check_prompt(request: GenerationRequest, index: int, expanded: Sequence[int]) -> None:
    """The ids that SGLang sampled from, images expanded, must be those that the learner trains on.

    Raises UserError naming the row.
    """
    prompt = request.seen_by(index)
    ours = [*prompt.token_ids.tolist(), *request.prefix(index)]
    if list(expanded) != ours:
        pairs = enumerate(zip_longest(expanded, ours))
        first = next(place for place, (one, other) in pairs if one != other)
        raise UserError(
            f"row {prompt.row_id}: SGLang and the processor make different prompts: {len(expanded)} and {len(ours)} "
            f"tokens, another one at position {first}. Keep the model folder as it is on both sides, and set sizes of "
            "images as model.min_pixels and model.max_pixels"
        )
