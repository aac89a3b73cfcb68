"""Record in an exported folder: its form, and how far its log-probs are from those of the policy that was sampled."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from asyncrl.telemetry.jsonl import write_atomically

RECORD_FILE = "asyncrl_export.json"
LARGEST_GAP = 0.01
"""Mean difference of a token's log-prob, in nats, above which an export differs from the policy."""


@dataclass(frozen=True)
class ExportRecord:
    form: Literal["model", "adapter", "merged"]
    """The policy's own weights, its adapter alone, or the adapter merged into its base."""
    dtype: str
    """Dtype of the weights; of an adapter's base, where the adapter is alone."""
    policy_dtype: str
    """model.dtype of the run."""
    base: str = ""
    """model.path of an adapter's run, and what its weights were rounded to in the learner."""
    quantization: str = ""
    """Precision of the weights that sampled, where the learner's had another one."""
    logprob_gap: float | None = None
    """Mean absolute difference of the log-probs of sampled tokens, in nats; None where the folder holds the weights
    that sampled."""
    tokens: int = 0
    """Tokens that were compared."""

    @property
    def differs(self) -> bool:
        """True where the folder is not the policy; a gap that is no number is none that is small."""
        return self.logprob_gap is not None and not self.logprob_gap <= LARGEST_GAP

    def describe(self) -> str:
        """One line for people."""
        form = {
            "model": f"the policy's own weights, {self.dtype}",
            "adapter": f"the policy's adapter, for {self.base} in {self.dtype}",
            "merged": f"the policy's adapter merged into {self.base} in {self.dtype}",
        }[self.form]
        if self.logprob_gap is None:
            return form
        gap = f"{form}; log-prob gap to the sampled policy {self.logprob_gap:.2g} nats a token ({self.tokens} tokens)"
        return f"{gap}: DIFFERS FROM THE POLICY. {self._ways_out()}" if self.differs else gap

    def _ways_out(self) -> str:
        if self.quantization:
            return f"It was sampled with {self.quantization} weights: serve it with such, or train without quantization"
        return (
            f"Use the adapter (asyncrl export RUN TARGET --adapter) on its base in {self.policy_dtype}, or train with "
            "model.dtype=float32, in which a merge is the policy"
        )


def write_record(folder: Path, record: ExportRecord) -> None:
    write_atomically(folder / RECORD_FILE, json.dumps(asdict(record), indent=2).encode())


def read_record(folder: Path) -> ExportRecord | None:
    """Record of a folder; None where it has none, or one of another version of asyncrl."""
    try:
        return ExportRecord(**json.loads((folder / RECORD_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
