"""The token budget of micro-batches: chosen by the memory plan, and halved where the device has no memory for one.

One process begins the pass again. Ranks, of which the others are in the middle of the same layer, and engines that
cannot (`Updates.begins_again`) begin the step again, in new processes, from checkpoint and journal. Both leave the
smaller budget in the run directory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from asyncrl.config.run_sections import BatchConfig
from asyncrl.config.service_sections import LearnerConfig
from asyncrl.errors import BadStateError, RestartError, UserError
from asyncrl.telemetry.jsonl import write_atomically
from learner.training.packing import TrainGroup
from learner.training.roles import Roles

logger = logging.getLogger(__name__)
T = TypeVar("T")
BUDGET_FILE = "token_budget.json"
"""The smaller budget in the run directory."""
HOLDS_FOR = ("engine", "num_processes", "cpu_offload", "gradient_checkpointing")
"""Keys of `learner` that decide how much memory a micro-batch may take. Where one has changed, the budget is the
configured one again."""


class TokenBudget:
    """`batch.tokens_per_microbatch`, or less once a pass found no memory: for the rest of the run where it is kept."""

    def __init__(self, roles: Roles, tokens: int):
        self.tokens = tokens
        self._roles = roles
        self._most = tokens
        self._is_chosen = False
        self._failures = 0
        self._file: Path | None = None
        self._settings: dict[str, Any] = {}

    def keep_in_run(self, run_path: Path, batch: BatchConfig, learner: LearnerConfig) -> None:
        """Go on with the budget that the run directory has of an earlier process, and leave a smaller one there. In the
        run's own `batch` there may be `auto`.

        A collective: all ranks take what rank 0 reads. Raises UserError where the file is not one of ours.
        """
        self._file = run_path / BUDGET_FILE
        self._is_chosen = batch.tokens_per_microbatch == "auto"
        own = {f"learner.{name}": section.model_dump() for name, section in (learner.model_extra or {}).items()}
        configured = {f"learner.{name}": getattr(learner, name) for name in HOLDS_FOR}
        self._settings = {"batch.tokens_per_microbatch": batch.tokens_per_microbatch} | configured | own
        ranks = self._roles.ranks
        read = str(self._read(self._file) if ranks.leads else 0)
        self.tokens = int(ranks.broadcast(read.encode()))

    def run(self, compute: Callable[[int], T], groups: Sequence[TrainGroup], where: str) -> T:
        """`compute(tokens)`, from its beginning with half of the tokens where it raises torch.OutOfMemoryError.

        Gradients of what was computed before are dropped: nothing counts twice. Raises BadStateError where every
        micro-batch is a single row already, and RestartError where a new process has to begin the step again.
        """
        while True:
            try:
                return compute(self.tokens)
            except torch.OutOfMemoryError as error:
                problem = _first_line(error)
            # After the `except` block: until then the error holds its frames, and they the activations.
            for role in (self._roles.actor, self._roles.critic):
                if role is not None:
                    role.drop_gradients()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._halve(groups, where, problem)

    def update(self, optimizer_step: Callable[[], T], where: str) -> T:
        """`optimizer_step()`. Raises BadStateError where it finds no memory: no smaller budget would leave it more."""
        try:
            return optimizer_step()
        except torch.OutOfMemoryError as error:
            raise BadStateError(
                f"{where}: no memory for the optimiser's step ({_first_line(error)}), whose weights, gradients and "
                "moments take the same whatever batch.tokens_per_microbatch is. Set learner.cpu_offload=true, "
                "model.lora.rank=16, or learner.engine=fsdp2 with several learner.num_processes; `asyncrl doctor "
                "--plan` says what takes the memory, and nvidia-smi who else has some"
            ) from error

    def repeat(self, tokens: int) -> None:
        """Have the budget that a step was recorded with, as if it were configured."""
        self.tokens = self._most = tokens

    def report(self) -> dict[str, float]:
        """The budget, where it was chosen or is less than configured, and then failures since the last report."""
        if self.tokens == self._most:
            return {"memory/tokens_per_microbatch": float(self.tokens)} if self._is_chosen else {}
        failures, self._failures = self._failures, 0
        return {"memory/tokens_per_microbatch": float(self.tokens), "memory/failures": float(failures)}

    def _halve(self, groups: Sequence[TrainGroup], where: str, problem: str) -> None:
        size = self._roles.ranks.size

        def plan(tokens: int) -> list[tuple[TrainGroup, ...]]:
            return [share.groups for shares in self._roles.plan(groups, tokens) for share in shares]

        largest = max(sum(group.num_tokens for group in part) for part in plan(self.tokens))
        said = f"{where}: no memory for micro-batches of up to {largest} tokens ({problem})"
        if _rows(plan(self.tokens)) == _rows(plan(1)):
            prompt, completion = max(
                ((len(group.prompt.token_ids), len(c.token_ids)) for group in groups for c in group.completions),
                key=sum,
            )
            raise BadStateError(
                f"{said}, and each is a single row, the longest of {prompt} prompt and {completion} completion tokens. "
                "Set learner.gradient_checkpointing=true, a smaller data.max_response_length, data.max_prompt_length "
                "or model.max_pixels, or model.lora.rank=16; `asyncrl doctor --plan` says what takes the memory"
            )
        self._failures += 1
        self.tokens = max(1, min(self.tokens, largest) // 2)
        if self._file is not None:
            kept = {"tokens": self.tokens, "instead_of": self._settings, "reason": said}
            write_atomically(self._file, json.dumps(kept, indent=2).encode())
        if size == 1 and self._roles.actor.updates.begins_again:
            logger.warning("%s. It begins again with a budget of %d (batch.tokens_per_microbatch)", said, self.tokens)
            return
        if self._file is None:
            raise BadStateError(f"{said}. Start again with batch.tokens_per_microbatch={self.tokens}")
        raise RestartError(
            f"{said}. The step begins again from checkpoint and journal, with a budget of {self.tokens} "
            f"(batch.tokens_per_microbatch; {self._file})"
        )

    def _read(self, file: Path) -> int:
        if not file.exists():
            return self.tokens
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            tokens, settings, reason = int(kept["tokens"]), kept["instead_of"], kept["reason"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is not what a learner writes there ({error!r}). Remove it") from None
        if settings != self._settings:
            logger.info("%s is of other settings: micro-batches have up to %d tokens again", file, self.tokens)
            return self.tokens
        if tokens >= self.tokens:  # another machine chose less by itself
            return self.tokens
        logger.warning(
            "micro-batches have up to %d tokens, not %d (batch.tokens_per_microbatch), until %s is removed: %s",
            tokens,
            self.tokens,
            file,
            reason,
        )
        return tokens


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _rows(plan: Sequence[Sequence[TrainGroup]]) -> list[list[int]]:
    """Rows of each micro-batch, in any order of these."""
    return sorted(sorted(c.row for group in part for c in group.completions) for part in plan)
