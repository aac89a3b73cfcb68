"""`ProcessScorer`: components of rewards, computed in worker processes."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.sections import RewardConfig, component_name
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score, request_of, scores_of
from asyncrl.rewards.spec import locate, scorer_of
from asyncrl.user_functions import imported_files, one_line, read_source
from asyncrl.workers.pool import WorkerPool
from asyncrl.workers.process import WorkerDied, WorkerProcess, WorkerProgram


class ProcessScorer:
    """Scores samples in workers of its own. Requests wait for a free place in order of arrival."""

    def __init__(
        self,
        program: Callable[[], WorkerProgram],
        timeout_s: float,
        *,
        setting: str,
        workers: int = 1,
        places: int = 1,
        grace_s: float = 0.0,
    ) -> None:
        """`setting` is the key of `timeout_s`; `places` are the requests that a worker takes at a time.

        `grace_s`: seconds beyond the time limit in which a worker says by itself that it was too late.
        """
        self.workers = WorkerPool(workers, places)
        self.counts: Counter[str] = Counter()
        """Sums of the counts in replies: `requests/OUTCOME` and `tokens/KIND`, of a reward that asks another service.
        """
        self._program = program
        self._timeout_s = timeout_s
        self._setting = setting
        self._is_blocked = places == 1
        """Whether a worker that does not answer can take no other request."""
        self._grace_s = grace_s

    async def start(self) -> None:
        """Raises UserError."""
        await self.workers.start(self._program())

    async def score(
        self, samples: Sequence[RewardSample], scores: Sequence[Score], names: Sequence[str]
    ) -> list[Score]:
        """Add the components `names` to the scores of one prompt's completions.

        Raises BadStateError where a lost worker does not start again, RuntimeError after `close()`.
        """
        message, part = request_of(samples, scores, names), ""
        limit_s = self._timeout_s + self._grace_s
        worker = await self.workers.take()
        started = time.perf_counter()
        kind, why = "reward_timeout", f"was not done after {self._timeout_s:g} s ({self._setting})"
        try:
            with worker.request(message) as request:
                try:
                    reply = await request.reply(limit_s)
                finally:
                    part = request.part
            if reply.get("is_last"):
                worker.kill("it ends after this reply")
            answered = self._scores(reply, len(samples), worker)
            if reply["seconds"] <= limit_s:  # else it came back just before it would have been killed
                return answered
        except TimeoutError:
            worker.kill("a request was not done in time")
        except WorkerDied as died:
            self.workers.check_open()
            kind, why = "reward_crash", f"lost its worker: {died}"
        except asyncio.CancelledError:
            if self._is_blocked:  # it is still busy with this sample
                worker.kill("its request is awaited no more")
            raise
        finally:
            self.workers.give_back(worker)
        seconds, why = time.perf_counter() - started, f"reward component {part or names[0]!r} {why}"
        return [score.failed(kind, why).later(seconds) for score in scores]

    def _scores(self, reply: dict[str, Any], samples: int, worker: WorkerProcess) -> list[Score]:
        """The scores in a reply. Raises WorkerDied, after its end, where no worker of ours sends such a one."""
        try:
            found = scores_of(reply)
            numbers = [reply["seconds"], *(number for score in found for number in score.components.values())]
            if len(found) != samples or not all(map(math.isfinite, numbers)):
                raise ValueError(f"{len(found)} scores of {samples} samples, the numbers {numbers}")
            self.counts.update(reply.get("counts", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            how = f"it sent a malformed reply ({one_line(error)})"
            worker.kill(how)
            raise WorkerDied(how) from None
        return found

    async def close(self) -> None:
        await self.workers.close()


def scorer_of_functions(config: RewardConfig) -> ProcessScorer:
    """The scorer of all reward functions, those of the user among them."""
    return ProcessScorer(lambda: _program(config), config.timeout_s, setting="reward.timeout_s", workers=config.workers)


def _program(config: RewardConfig) -> WorkerProgram:
    """The program holds the functions' files as they are now, and hashes of those that they import: edits change no
    running run."""
    components: list[dict[str, Any]] = []
    imported: dict[Path, str] = {}
    for component in config.functions:
        if scorer_of(component) is not None:
            continue
        name, located = component_name(component), locate(component.function)
        entry = {"name": name, "kwargs": component.kwargs, "function": component.function}
        entry |= {"group": component.group, "shapes": config.shaped[name], "path": "", "package": "", "source": b""}
        if located is not None:
            source = read_source(located.path)
            entry |= {"function": located.name, "path": str(located.path), "package": located.package, "source": source}
            imported |= imported_files(located)
        components.append(entry)
    return WorkerProgram(
        module="asyncrl.rewards.worker",
        setup={"components": components},
        section="reward",
        loads="the reward functions",
        memory_limit_mib=config.memory_limit_mib,
        files=imported,
    )
