"""Three rows scored by the real reward worker: the answer itself, nothing, and what one would imitate."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import RowSource
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.errors import UserError
from asyncrl.rewards.pool import RewardPool, Score
from asyncrl.rewards.presentation import sample_of
from asyncrl.tools.doctor.findings import Finding, Findings

ROWS = 3
ROWS_TRIED = 100
"""Those that cannot be rendered do not count."""
_WORKER_START_S = 90.0
NOTHING = "nothing"

Scored = dict[str, list[Score]]
"""By what the completion was: the answer, nothing, the demonstration."""


def deadline_s(config: RunConfig) -> float:
    """A worker that is killed at every completion still ends in time."""
    return _WORKER_START_S + 3 * ROWS * (config.reward.timeout_s + 5)


def find_rewards(config: RunConfig, rows: RowSource, renderer: PromptRenderer) -> Findings[None]:
    scored = asyncio.run(_score(config, list(_completions(config, rows, renderer))))
    failed: dict[str, Score] = {}
    for completion, scores in scored.items():
        for score in scores:
            if score.status != "ok":
                failed.setdefault(f"{score.error_kind} on {completion}", score)
    for name, score in failed.items():
        value = f"{name}: {score.error_message}"
        fix = "mend the function: a trajectory that it fails on is left out of training, never scored 0"
        yield Finding("reward", value, "problem", fix)
        return  # the others are of the same function
    if not scored:
        yield Finding("reward", "was loaded, but there is no row to score", "note")
        return
    for name in config.reward.component_names:
        yield Finding("reward", f"{name}: {_values(scored, name)}")
    weighted = {completion: [score.reward for score in scores] for completion, scores in scored.items()}
    good = [values for completion, values in weighted.items() if completion != NOTHING]
    if all(values == weighted[NOTHING] for values in good):
        value = f"the weighted sum does not tell {' or '.join(c for c in weighted if c != NOTHING)} from {NOTHING}"
        fix = "look whether the reward wants a form that data.format_prompt or the warm start teaches; if not, mend it"
        yield Finding("reward", value, "warning", fix)


def _completions(
    config: RunConfig, rows: RowSource, renderer: PromptRenderer
) -> Iterator[tuple[RenderedPrompt, str, str]]:
    """A row, what the completion is, and the completion."""
    found = 0
    for index in range(min(len(rows), ROWS_TRIED)):
        row, row_id = rows[index], rows.row_id(index)
        try:
            rendered = renderer.render(row, row_id)
        except UserError:  # told with the prompts
            continue
        yield rendered, "the answer", str(rendered.prompt.answer)
        yield rendered, NOTHING, ""
        if row.get(config.data.target_key):
            yield rendered, config.data.target_key, str(row[config.data.target_key])
        found += 1
        if found == ROWS:
            return


async def _score(config: RunConfig, completions: Sequence[tuple[RenderedPrompt, str, str]]) -> Scored:
    pool = RewardPool(config.reward.model_copy(update={"workers": 1}))
    await pool.start()
    try:
        scored: Scored = defaultdict(list)
        for rendered, name, text in completions:
            scored[name].append(await pool.score(sample_of(rendered.prompt, text, rendered.blobs, "stop")))
        return scored
    finally:
        await pool.close()


def _values(scored: Scored, component: str) -> str:
    parts: list[Any] = []
    for completion, scores in scored.items():
        values = ", ".join(f"{score.components[component]:g}" for score in scores)
        parts.append(f"{values} for {completion}")
    return "; ".join(parts)
