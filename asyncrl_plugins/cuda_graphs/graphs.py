"""Decode steps that were captured, by their rows and columns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

MOST_GRAPHS = 32
"""Graphs that are kept; the least recently used leaves first."""
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Accepted difference between logits of a graph and of the step that it was captured from, by dtype, as a part of the
largest logit. Their kernels are the same as a rule, but a library may choose another one while it is captured."""

Work = Callable[[], torch.Tensor]
"""A step over tensors that stay. Its result has the same address each time, and computing it twice changes nothing."""
Capture = Callable[[Work], Callable[[], None]]
"""Takes work down, and returns what computes it again without Python."""


class WrongReplayError(Exception):
    """A replay has computed something else than its step, and may have written anywhere in the cache."""


class CudaCapture:
    """Captures work as CUDA graphs. They share one pool of memory: one runs at a time, and its result is outside."""

    def __init__(self, device: torch.device):
        self._device = device
        with torch.cuda.device(device):
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Callable[[], None]:
        torch.cuda.empty_cache()  # while it captures, the allocator gives back nothing of what other work has left
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would leave another current stream behind where work fails.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # Other threads may pin memory or copy weights meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the same failure again
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay


@dataclass
class CapturedStep:
    replay: Callable[[], None]
    result: torch.Tensor
    is_checked: bool = False
    """True once a replay has been compared with the step itself."""


class StepGraphs:
    """Captured steps of one engine. Not thread-safe: its decode thread owns them."""

    def __init__(self, make_capture: Callable[[], Capture] | None, most: int = MOST_GRAPHS):
        """None captures nothing: each step is computed by Python."""
        self._make_capture = make_capture
        self._most = most
        self._capture: Capture | None = None
        self._steps: dict[tuple[int, int], CapturedStep] = {}
        self.failure = ""
        """Reason for which steps are computed without graphs from now on."""

    def run(self, shape: tuple[int, int], work: Work) -> torch.Tensor:
        """Compute a step of so many rows and columns.

        The first of a shape is computed by Python, which also warms kernels up, and captured. The second one, of
        another column, is computed in both ways and compared: numbers that Python took down would be old ones. Later
        ones are replayed. Raises WrongReplayError where the two differ; no step is captured after that.
        """
        if self.failure or self._make_capture is None:
            return work()
        step = self._steps.pop(shape, None)
        if step is None:
            result = work()
            step = self._captured(work, result, self._make_capture)
        elif step.is_checked:
            step.replay()
            result = step.result
        else:
            result = self._checked(step, work)
        if step and not self.failure:
            self._steps[shape] = step
        return result

    def drop(self) -> None:
        """Forget all graphs: tensors that they read have other addresses now, or are to be freed."""
        self._steps.clear()
        self._capture = None  # a pool whose graphs are all gone is not used again

    def _captured(self, work: Work, result: torch.Tensor, make_capture: Callable[[], Capture]) -> CapturedStep | None:
        if len(self._steps) >= self._most:
            del self._steps[next(iter(self._steps))]
        try:
            self._capture = self._capture or make_capture()
            return CapturedStep(self._capture(work), result)
        except Exception as error:
            self._give_up(f"a capture failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})")
            return None

    def _checked(self, step: CapturedStep, work: Work) -> torch.Tensor:
        expected = work().clone()
        step.replay()
        step.is_checked = True
        largest = float(expected.nan_to_num().abs().max())
        limit = LARGEST_DIFFERENCE[expected.dtype] * largest
        # A slot in which a broken version computed NaN has no sequence any more, but a row here.
        if torch.allclose(step.result, expected, rtol=0, atol=limit, equal_nan=True):
            return step.result
        difference = float((step.result - expected).abs().max())
        self._give_up(
            f"logits of a replay differ by {difference:.3g} from those of its step, the largest {largest:.3g}"
        )
        raise WrongReplayError(self.failure)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self.drop()
        logger.warning("the hf engine goes on without CUDA graphs: %s", reason)
