"""Our requests as vLLM's, checked and with pixels, and vLLM's answers as our columns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from asyncrl.data.images import decode_image
from asyncrl.errors import BadStateError, UserError
from asyncrl.processing.encoded_prompt import EncodedPrompt, VideoFrames
from asyncrl_plugins.vllm.plugin import ROUTED_EXPERTS, temperature_problem
from protocol.messages import FinishReason, TokenTraces
from rollout_server.engines.base import Completion, GenerationRequest, version_column

ABORTED = "abort"
"""vLLM's finish reason of what was interrupted."""


def check_request(request: GenerationRequest, banned: tuple[int, ...], max_tokens: int) -> None:
    """Raises UserError for what this engine, which bans `banned` and has room for `max_tokens`, cannot honour."""
    sampling, row = request.sampling, request.prompt.row_id
    if problem := temperature_problem(sampling.temperature):
        raise UserError(f"the temperature of ticket {request.request_id} is {problem}")
    if set(banned) != set(sampling.banned_token_ids):
        raise UserError(
            f"ticket {request.request_id} bans the token ids {sorted(sampling.banned_token_ids)}, and this engine bans "
            f"{sorted(banned)}, the model's image placeholders and fences. Start both services with the same model.path"
        )
    length = len(request.prompt.token_ids)
    if length + sampling.max_new_tokens > max_tokens:
        raise UserError(
            f"row {row}: {length} prompt tokens and up to {sampling.max_new_tokens} new ones are more than the "
            f"{max_tokens} that vLLM was started for. Raise data.max_prompt_length or data.max_response_length on "
            "this server"
        )


async def engine_input_of(llm: Any, prompt: dict[str, Any]) -> Any:
    """A prompt as vLLM renders it, with all of its images and videos, whatever vLLM's core keeps of them."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt  # pyright: ignore[reportMissingImports]

    parsed = parse_model_prompt(llm.vllm_config.model_config, prompt)
    (engine_input,) = await llm.renderer.render_cmpl_async([parsed], skip_mm_cache=True)
    return engine_input


async def to_engine_input(request: GenerationRequest, llm: Any, index: int = 0) -> Any:
    """The prompt and prefix of completion `index` as vLLM's engine takes them: expanded, with pixels; checked against
    our own processor's."""
    encoded, prefix = request.seen_by(index), request.prefix(index)
    ids = encoded.token_ids if encoded.unexpanded_ids is None else encoded.unexpanded_ids
    prompt: dict[str, Any] = {"prompt_token_ids": [*ids.tolist(), *prefix]}
    if encoded.images or encoded.videos:
        prompt |= await asyncio.to_thread(_media, encoded)
    engine_input = await engine_input_of(llm, prompt)
    check_alignment(encoded, engine_input, prefix)
    return engine_input


def _media(prompt: EncodedPrompt) -> dict[str, Any]:
    """Images and videos, known by their content already: vLLM need not hash the pixels again."""
    where = f"row {prompt.row_id}"
    data: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    if prompt.images:
        data["image"] = [decode_image(encoded, where) for encoded in prompt.images]
        names["image"] = list(prompt.image_hashes)
    if prompt.videos:
        data["video"] = [_frames(video, where) for video in prompt.videos]
        # Where tokens stand in time depends on the rate, and what vLLM keeps of a prefix on that.
        names["video"] = [
            f"{name}-{video.fps!r}" for name, video in zip(prompt.video_hashes, prompt.videos, strict=True)
        ]
    return {
        "multi_modal_data": data,
        "multi_modal_uuids": names,
        "mm_processor_kwargs": {"do_sample_frames": False} if prompt.videos else {},
    }


def _frames(video: VideoFrames, where: str) -> tuple[np.ndarray, dict[str, Any]]:
    """[frames, height, width, 3] uint8, and what `media_arguments` tells the processor about them."""
    frames = np.stack([np.asarray(decode_image(frame, where)) for frame in video.frames])
    count = len(frames)
    return frames, {"total_num_frames": count, "fps": video.fps, "frames_indices": list(range(count))}


def sampling_params(request: GenerationRequest, index: int) -> Any:
    """Sampling parameters of the group's completion `index`: its random stream depends on ticket seed and index only.

    Greedy decoding (temperature 0) gets the log-probs of temperature 1, as the protocol has it.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    sampling = request.sampling_of(index)
    # vLLM's stream begins at the first token that it samples: what goes on elsewhere must not meet the same numbers.
    sampled_before = len(request.prefix(index)) - len(request.requested(index))
    seed = (*request.seed_of(index), *([sampled_before] if sampled_before else []))
    state: Any = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=int(state[0]) >> 1,
        max_tokens=sampling.max_new_tokens - len(request.prefix(index)),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the ticket's stop ids decide alone
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_completion(request: GenerationRequest, index: int, output: Any, submitted_version: int) -> Completion:
    """A `CompletionOutput`, finished or aborted, behind its prefix, which was put there at the `submitted_version`."""
    prefix = request.prefix(index)
    token_ids = np.asarray([*prefix, *output.token_ids], np.int32)
    spans = [(int(span.version), span.start, span.end) for span in output.weight_versions or ()]
    sampled_versions = version_column(spans, len(output.token_ids), "vLLM")
    versions = np.concatenate([np.full(len(prefix), submitted_version, np.int32), sampled_versions])
    logprobs = np.asarray([*[0.0] * len(prefix), *output.logprobs.logprobs], np.float32)
    if output.logprobs.token_ids != list(output.token_ids):
        raise BadStateError(
            f"vLLM returned log-probs of {len(output.logprobs.token_ids)} tokens for {len(output.token_ids)} sampled "
            f"ones of ticket {request.request_id}: they are not of the same tokens"
        )
    return Completion(
        request_id=request.request_id,
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=None if output.finish_reason == ABORTED else FinishReason(output.finish_reason),
        traces={}
        if output.routed_experts is None
        else {ROUTED_EXPERTS: _experts(request, index, output, len(token_ids))},
        stream=request.stream,
    )


def _experts(request: GenerationRequest, index: int, output: Any, length: int) -> TokenTraces:
    """Experts of the prompt's tokens, and of `length` of the completion, whose last one was no input."""
    found: np.ndarray = output.routed_experts
    prompt = len(request.seen_by(index).token_ids)
    if len(found) != prompt + length - 1:
        raise BadStateError(
            f"vLLM returned the experts of {len(found)} tokens for the {prompt + length - 1} that it computed of "
            f"ticket {request.request_id}"
        )
    rows = np.ascontiguousarray(found).view(np.uint8).reshape(len(found), -1)
    return TokenTraces(prompt=rows[:prompt], completions=np.concatenate([rows[prompt:], np.zeros_like(rows[:1])]))


def check_alignment(prompt: EncodedPrompt, engine_input: Any, prefix: Sequence[int] = ()) -> None:
    """vLLM's processor must have made the ids, grids and times that ours made, and put images where they are for the
    learner, which trains on ours. Of a later turn that is the whole row, with what was shown between turns.

    Raises UserError naming the row.
    """
    for what, from_vllm, ours in _differences(prompt, engine_input, prefix):
        raise UserError(
            f"row {prompt.row_id}: vLLM and the processor make different {what}: {from_vllm} and {ours}. Keep "
            "the model folder as it is on both sides, and set sizes of images as model.min_pixels and model.max_pixels"
        )


def _differences(prompt: EncodedPrompt, engine_input: Any, prefix: Sequence[int]) -> Iterator[tuple[str, Any, Any]]:
    from_vllm, ours = list(engine_input["prompt_token_ids"]), [*prompt.token_ids.tolist(), *prefix]
    if from_vllm != ours:
        pairs = enumerate(zip_longest(from_vllm, ours))
        first = next(place for place, (one, other) in pairs if one != other)
        yield f"numbers of tokens, or at position {first} another token", len(from_vllm), len(ours)
    for number, kind, grids in ((1, "image", prompt.image_grids), (2, "video", prompt.video_grids)):
        ranges = engine_input["mm_placeholders"][kind] if len(grids) else ()
        filled = [place for part in ranges for a, b in part.extract_embeds_range() for place in range(a, b + 1)]
        places = np.flatnonzero(prompt.token_types == number).tolist()
        if len(ranges) != len(grids) or filled != places:
            yield f"numbers, or places, of the {kind}s", (len(ranges), filled), (len(grids), places)
        items = engine_input["mm_kwargs"][kind] if len(grids) else ()
        cut = [item[f"{kind}_grid_thw"].data.tolist() for item in items if f"{kind}_grid_thw" in item]
        if cut and cut != grids.tolist():
            yield f"patches of the {kind}s", cut, grids.tolist()
        seconds = [float(item["second_per_grid_ts"].data) for item in items if "second_per_grid_ts" in item]
        if seconds and seconds != list(prompt.seconds_per_grid):
            yield f"seconds between patches of the {kind}s", seconds, list(prompt.seconds_per_grid)
