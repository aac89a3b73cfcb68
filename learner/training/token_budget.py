"""The token budget of micro-batches, which is halved where the device has no memory for one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from asyncrl.errors import BadStateError
from learner.training.packing import TrainGroup, plan_micro_batches
from learner.training.roles import Roles

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TokenBudget:
    """`batch.tokens_per_microbatch`, or less once a pass found no memory: for the rest of this process."""

    def __init__(self, roles: Roles, tokens: int):
        self.tokens = tokens
        self._roles = roles
        self._most = tokens
        self._failures = 0

    def run(self, compute: Callable[[int], T], groups: Sequence[TrainGroup], where: str) -> T:
        """`compute(tokens)`, from its beginning with half of the tokens where it raises torch.OutOfMemoryError.

        Gradients of what was computed before are dropped: nothing counts twice. Raises BadStateError where every
        micro-batch is a single row already, where the engine cannot begin a pass again, and with several ranks, which
        are in the middle of the same layer then.
        """
        while True:
            try:
                return compute(self.tokens)
            except torch.OutOfMemoryError as error:
                problem = str(error).partition("\n")[0]
            # After the `except` block: until then the error holds its frames, and they the activations.
            for role in (self._roles.actor, self._roles.critic):
                if role is not None:
                    role.drop_gradients()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._halve(groups, where, problem)

    def report(self) -> dict[str, float]:
        """The budget, once it is less than configured, and failures since the last report."""
        if self.tokens == self._most:
            return {}
        failures, self._failures = self._failures, 0
        return {"memory/tokens_per_microbatch": float(self.tokens), "memory/failures": float(failures)}

    def _halve(self, groups: Sequence[TrainGroup], where: str, problem: str) -> None:
        plan = plan_micro_batches(groups, self.tokens)
        largest = max(sum(group.num_tokens for group in part) for part in plan)
        said = f"{where}: no memory for micro-batches of up to {largest} tokens ({problem})"
        if self._roles.ranks.size > 1 or not self._roles.actor.updates.begins_again:
            raise BadStateError(
                f"{said}. Ranks, which compute layer by layer together, and DeepSpeed cannot begin again. Resume with "
                f"batch.tokens_per_microbatch={max(1, largest // 2)}, learner.gradient_checkpointing=true or more ranks"
            )
        if all(sum(len(group.completions) for group in part) == 1 for part in plan):
            prompt, completion = max(
                ((len(group.prompt.token_ids), len(group.completions[0].token_ids)) for (group,) in plan), key=sum
            )
            raise BadStateError(
                f"{said}, and each is a single row, the longest of {prompt} prompt and {completion} completion tokens. "
                "Set learner.gradient_checkpointing=true, a smaller data.max_response_length, data.max_prompt_length "
                "or model.max_pixels, or model.lora.rank=16; `asyncrl doctor --plan` says what takes the memory"
            )
        self._failures += 1
        self.tokens = max(1, min(self.tokens, largest) // 2)
        logger.warning("%s. It begins again with a budget of %d (batch.tokens_per_microbatch)", said, self.tokens)
