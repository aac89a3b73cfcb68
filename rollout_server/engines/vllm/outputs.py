"""vLLM's answers as our columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.errors import BadStateError, UserError
from asyncrl.models.processing import EncodedPrompt
from protocol.messages import FinishReason
from rollout_server.engines.base import Completion, GenerationRequest


def to_completion(request: GenerationRequest, index: int, output: Any, cached_version: int | None) -> Completion:
    """A finished `CompletionOutput`. `cached_version`: of the oldest keys and values it may have read; None: all its
    tokens were sampled from a cache of their own version."""
    token_ids = np.asarray(output.token_ids, np.int32)
    versions = version_column(output.weight_versions or (), len(token_ids))
    logprobs = np.asarray(output.logprobs.logprobs, np.float32)
    if output.logprobs.token_ids != list(output.token_ids):
        raise BadStateError(
            f"vLLM returned log-probs of {len(output.logprobs.token_ids)} tokens for {len(token_ids)} sampled ones of "
            f"ticket {request.request_id}: they are not of the same tokens"
        )
    mixed = cached_version is not None and bool((versions != cached_version).any())
    return Completion(
        request_id=request.request_id,
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=FinishReason(output.finish_reason),
        kv_versions=np.full_like(versions, cached_version) if mixed else None,
    )


def version_column(spans: Sequence[Any], length: int) -> np.ndarray:
    """[T] from vLLM's own record of which weights sampled which tokens, which must cover all of them in order."""
    column = np.empty(length, np.int32)
    end = 0
    for span in spans:
        if span.start != end or span.end < span.start:
            break
        column[span.start : span.end] = int(span.version)
        end = span.end
    if end != length:
        raise BadStateError(f"vLLM's record of weight versions {list(spans)} does not cover {length} tokens in order")
    return column


# --- the alignment contract -----------------------------------------------------------------


def check_alignment(prompt: EncodedPrompt, engine_input: Any) -> None:
    """vLLM's processor must have made the ids and grids that ours made: the learner trains on ours.

    Raises UserError naming the row.
    """
    theirs = np.asarray(engine_input["prompt_token_ids"], np.int64)
    ours = prompt.token_ids
    fix = "Keep processor settings out of rollout.engine_args, and the model folder as it is on both sides"
    if len(theirs) != len(ours) or (theirs != ours).any():
        shared = min(len(theirs), len(ours))
        differing = np.flatnonzero(theirs[:shared] != ours[:shared])
        first = int(differing[0]) if len(differing) else shared
        raise UserError(
            f"row {prompt.row_id}: vLLM expands the prompt to {len(theirs)} tokens and the processor to {len(ours)}; "
            f"they first differ at position {first}. {fix}"
        )
    _check_part(prompt, engine_input, "image", prompt.image_grids, fix)
    _check_part(prompt, engine_input, "video", prompt.video_grids, fix)


def _check_part(prompt: EncodedPrompt, engine_input: Any, kind: str, grids: np.ndarray, fix: str) -> None:
    """Of all its images, or of all its videos."""
    if not len(grids):
        return
    items = engine_input["mm_kwargs"][kind]
    theirs = [item[f"{kind}_grid_thw"].data.tolist() for item in items if f"{kind}_grid_thw" in item]
    if theirs and theirs != grids.tolist():
        raise UserError(
            f"row {prompt.row_id}: vLLM cuts the {kind}s into {theirs} patches and the processor into "
            f"{grids.tolist()}. {fix}"
        )
    seconds = [float(item["second_per_grid_ts"].data) for item in items if "second_per_grid_ts" in item]
    if seconds and seconds != list(prompt.seconds_per_grid):
        raise UserError(
            f"row {prompt.row_id}: vLLM places {kind} patches {seconds} seconds apart and the processor "
            f"{list(prompt.seconds_per_grid)}. {fix}"
        )
