"""Our requests as vLLM's: checked, expanded, with pixels, and with its names for our sampling."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from asyncrl.config.engine_rules import too_cold
from asyncrl.data.images import decode_image
from asyncrl.errors import UserError
from rollout_server.engines.base import GenerationRequest, VideoFrames
from rollout_server.engines.vllm.outputs import check_alignment
from rollout_server.engines.vllm.vllm_api import VllmApi


def check_request(request: GenerationRequest, banned: tuple[int, ...], max_tokens: int) -> None:
    """Raises UserError for what this engine, which bans `banned` and has room for `max_tokens`, cannot honour."""
    sampling, row = request.sampling, request.prompt.row_id
    if problem := too_cold(sampling.temperature):
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


async def to_engine_input(request: GenerationRequest, llm: Any, vllm: VllmApi) -> Any:
    """The prompt as vLLM's engine takes it: expanded, with pixels; checked against our own processor's."""
    encoded = request.prompt
    ids = encoded.token_ids if encoded.unexpanded_ids is None else encoded.unexpanded_ids
    prompt: dict[str, Any] = {"prompt_token_ids": ids.tolist()}
    if request.images or request.videos:
        prompt |= await asyncio.to_thread(_media, request)
    parsed = vllm.parse_model_prompt(llm.vllm_config.model_config, prompt)
    (engine_input,) = await llm.renderer.render_cmpl_async([parsed])
    check_alignment(request.prompt, engine_input)
    return engine_input


def _media(request: GenerationRequest) -> dict[str, Any]:
    """Images and videos, known by their content already: vLLM need not hash the pixels again."""
    where = f"row {request.prompt.row_id}"
    data: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    if request.images:
        data["image"] = [decode_image(encoded, where) for encoded in request.images]
        names["image"] = list(request.prompt.image_hashes)
    if request.videos:
        data["video"] = [_frames(video, where) for video in request.videos]
        # Where tokens stand in time depends on the rate, and what vLLM keeps of a prefix on that.
        names["video"] = [
            f"{name}-{video.fps!r}" for name, video in zip(request.prompt.video_hashes, request.videos, strict=True)
        ]
    return {
        "multi_modal_data": data,
        "multi_modal_uuids": names,
        "mm_processor_kwargs": {"do_sample_frames": False} if request.videos else {},
    }


def _frames(video: VideoFrames, where: str) -> tuple[np.ndarray, dict[str, Any]]:
    """[frames, height, width, 3] uint8, and what `media_arguments` tells the processor about them."""
    frames = np.stack([np.asarray(decode_image(frame, where)) for frame in video.frames])
    count = len(frames)
    return frames, {"total_num_frames": count, "fps": video.fps, "frames_indices": list(range(count))}


def sampling_params(request: GenerationRequest, index: int, vllm: VllmApi) -> Any:
    """Of the group's completion `index`, with a random stream that depends on the ticket's seed and the index only.

    Greedy decoding (temperature 0) gets the log-probs of temperature 1, as the protocol has it.
    """
    sampling = request.sampling
    state: Any = np.random.SeedSequence((request.seed, index)).generate_state(1, np.uint64)
    return vllm.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=int(state[0]) >> 1,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the ticket's stop ids decide alone
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=vllm.RequestOutputKind.FINAL_ONLY,
    )
