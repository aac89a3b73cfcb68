"""Turns batch.tokens_per_microbatch=auto into a number: the largest whose plan fits the learner's device. So it does
with learner.gradient_checkpointing=true, within a budget: of layers that keep their activations.

No formula of the model: each number that is tried is rehearsed (rehearsal.py), so that whatever changes a pass, such as
another loss or gradient checkpointing, changes the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from asyncrl.config.run_sections import USUAL_TOKENS
from asyncrl.config.schema import RunConfig, changed
from asyncrl.memory_plan import GIB, size
from asyncrl.memory_plan.lines import WORKING
from asyncrl.memory_plan.plan import MemoryPlan, engine_fills, longest_sequence, make_plan
from asyncrl.memory_plan.rehearsal import NoPlanError
from asyncrl.model_files.folder import read_config, text_part

KEY, LAYERS = "batch.tokens_per_microbatch", "learner.gradient_checkpointing"
FAR = 4
"""Largest factor of the next attempt over the tokens of a plan that fits."""


def settle_tokens(config: RunConfig, device_bytes: int = 0) -> tuple[RunConfig, str]:
    """The configuration with a number in the place of `auto`, and a line that says why; "" where it was a number.

    The limit is gpu_memory.budget_gib, or else the `device_bytes` that the learner may take. Where not even the longest
    sample fits, the number is that sample's: the plan's check refuses it. Takes as long as four or five plans.
    """
    if config.batch.tokens_per_microbatch != "auto":
        return config, ""
    limit, steps = int(config.gpu_memory.budget_gib * GIB) or device_bytes, token_steps(config)
    tokens = max(step for step in steps if step <= max(USUAL_TOKENS, steps[0]))
    what = {USUAL_TOKENS: "the default", steps[0]: "the longest sample"}.get(tokens, "all of a step")
    why = f", {what}, as there is neither a GPU nor gpu_memory.budget_gib to choose it by"
    if limit:
        try:
            tokens, plan, limit = _largest_fitting(steps, limit, lambda step: changed(config, {KEY: step}))
            lines = plan.phases[0].lines  # the learner's come first
            passing = next(line.nbytes for line in lines if line.name == WORKING)
            free = max(0, limit - plan.phases[0].nbytes + passing)
            whole = ", all of a step" + " on a rank" * (config.learner.num_processes > 1)
            why = {steps[0]: ", the longest sample", steps[-1]: whole}.get(tokens, "")
            why += f": {size(free)} are free for a pass, which takes {passing / tokens / 2**20:.2g} MiB a token"
        except NoPlanError as problem:
            why = f", {what}. {problem}"
    return changed(config, {KEY: tokens}), f"{KEY}: auto is {tokens:,} here{why}"


def settle_layers(config: RunConfig, ranks: int) -> tuple[RunConfig, str]:
    """The configuration with a number in the place of learner.gradient_checkpointing=true, and a line that says why: as
    few layers as gpu_memory.budget_gib lets. "" without a budget, and where an engine takes its rest. Tokens are
    settled. Takes as long as up to seven plans."""
    budget = int(config.gpu_memory.budget_gib * GIB)
    if config.learner.gradient_checkpointing is not True or not budget or engine_fills(config):
        return config, ""
    config = changed(config, {"learner.num_processes": ranks})
    layers = int(text_part(read_config(config.model)).get("num_hidden_layers") or 1)
    kept, *_ = _largest_fitting(range(layers), budget, lambda kept: changed(config, {LAYERS: layers - kept}))
    said = f"{LAYERS}: {layers - kept} of {layers} layers are computed again, the others fit gpu_memory.budget_gib"
    return changed(config, {LAYERS: layers - kept}), said


def token_steps(config: RunConfig) -> list[int]:
    """Numbers to choose from, ascending: the longest sample's, powers of two and the middles between them, up to the
    first by which a rank takes all of an optimiser step in one pass."""
    groups = config.batch.prompts_per_step // config.algorithm.updates_per_batch
    group = config.data.max_prompt_length + config.trajectories_per_group * config.data.max_response_length
    most = -(-groups * group // config.learner.num_processes)
    steps = [longest_sequence(config.data)]
    for power in count():
        for step in (2 * 2**power, 3 * 2**power):
            if steps[-1] >= most:
                return steps
            if step > steps[0]:
                steps.append(step)
    raise AssertionError


def _largest_fitting(steps: Sequence[int], limit: int, at: Callable[[int], RunConfig]) -> tuple[int, MemoryPlan, int]:
    """Look upwards from the first step, then between a plan that fits and one that does not. A pass is about linear in
    its tokens: the line through two plans says where to look next. Of far too many tokens a plan takes long. Returns
    the step, its plan and the bytes that it may take; the first step also where it takes more."""
    plans: dict[int, MemoryPlan] = {}

    def fits(place: int) -> bool:
        plans[place] = make_plan(at(steps[place]))
        return plans[place].phases[0].nbytes <= limit

    low, high = 0, len(steps)
    if not fits(low):
        return steps[low], plans[low], limit
    if engine_fills(plans[low].config):
        least = plans[low].phases[0].nbytes
        limit = least + (limit - least) // 2  # the plan has the least of the engine's cache: it shares what is left
    while high - low > 1:
        reach = FAR * steps[low]
        if len(plans) > 1:
            one, other = sorted(plans, key=lambda place: abs(plans[place].phases[0].nbytes - limit))[:2]
            slope = (plans[other].phases[0].nbytes - plans[one].phases[0].nbytes) / (steps[other] - steps[one])
            reach = min(reach, steps[one] + (limit - plans[one].phases[0].nbytes) / max(slope, 1.0))
        guess = max((place for place in range(low + 1, high) if steps[place] <= reach), default=low + 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return steps[low], plans[low], limit
