"""Turns batch.tokens_per_microbatch=auto into a number: the largest whose plan fits the learner's device.

No formula of the model: each number that is tried is rehearsed (rehearsal.py), so that whatever changes a pass, such as
another loss or gradient checkpointing, changes the number.
"""

from __future__ import annotations

from itertools import count

from asyncrl.config.run_sections import USUAL_TOKENS
from asyncrl.config.schema import RunConfig, changed
from asyncrl.memory_plan import GIB, size
from asyncrl.memory_plan.lines import WORKING
from asyncrl.memory_plan.plan import MemoryPlan, longest_sequence, make_plan
from asyncrl.memory_plan.rehearsal import NoPlanError

KEY = "batch.tokens_per_microbatch"
FAR = 4
"""Largest factor of the next attempt over the tokens of a plan that fits."""


def settle_tokens(config: RunConfig, device_bytes: int = 0) -> tuple[RunConfig, str]:
    """The configuration with a number in the place of `auto`, and a line that says why; "" where it was a number.

    The limit is gpu_memory.budget_gib, or else the `device_bytes` that the learner may take. Where not even the longest
    sample fits, the number is that sample's: the plan's check refuses it. Takes as long as four or five plans.
    """
    if config.batch.tokens_per_microbatch != "auto":
        return config, ""
    limit = int(config.gpu_memory.budget_gib * GIB) or device_bytes
    steps = token_steps(config)
    usual = max(step for step in steps if step <= max(USUAL_TOKENS, steps[0]))
    what = {USUAL_TOKENS: "the default", steps[0]: "the longest sample"}.get(usual, "all of a step")
    why = f"{what}, as there is neither a GPU nor gpu_memory.budget_gib to choose it by"
    if limit:
        try:
            return _largest_fitting(config, steps, limit)
        except NoPlanError as problem:
            why = f"{what}. {problem}"
    return changed(config, {KEY: usual}), f"{KEY}: auto is {usual:,} here, {why}"


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


def _largest_fitting(config: RunConfig, steps: list[int], limit: int) -> tuple[RunConfig, str]:
    """Look upwards from the longest sample, then between a plan that fits and one that does not. A pass is about linear
    in its tokens: the line through two plans says where to look next. Of far too many tokens a plan takes long."""
    plans: dict[int, MemoryPlan] = {}

    def fits(place: int) -> bool:
        plans[place] = make_plan(changed(config, {KEY: steps[place]}))
        return plans[place].phases[0].nbytes <= limit

    low, high = 0, len(steps)
    if not fits(low):
        return _settled(config, plans[low], steps[low], limit, "the longest sample")
    if plans[low].engine_fills:
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
    whole = "all of a step" + " on a rank" * (config.learner.num_processes > 1)
    return _settled(config, plans[low], steps[low], limit, whole if steps[low] == steps[-1] else "")


def _settled(config: RunConfig, plan: MemoryPlan, tokens: int, limit: int, what: str) -> tuple[RunConfig, str]:
    phase = plan.phases[0]
    passing = next(line.nbytes for line in phase.lines if line.name == WORKING)  # the learner's lines come first
    free = max(0, limit - phase.nbytes + passing)
    why = f"{size(free)} are free for a pass, which takes {passing / tokens / 2**20:.2g} MiB a token"
    return changed(config, {KEY: tokens}), f"{KEY}: auto is {tokens:,} here{what and f', {what}'}: {why}"
