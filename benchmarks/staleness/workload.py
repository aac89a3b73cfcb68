"""Simulated work: groups with log-normal lengths from the scripted engine, without model, tokenizer or rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from scripted_engine.engine import ScriptedEngine

from asyncrl.config.schema import RunConfig
from asyncrl.config.service_sections import OnStale
from asyncrl.data.survey.held_out import ticket_seed
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.published import fingerprint_of
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.rewards.score import Score
from learner.groups.ticket import PreparedTicket
from protocol.messages import ChatMessage, Prompt, Sampling, TextPart, Ticket, TicketKind

VOCABULARY = 64
STOP_ID = 0
WEIGHTS = bytes(1 << 20)
MODEL, PROCESSOR = fingerprint_of([("w", "torch.uint8", (len(WEIGHTS),))]), "scripted-processor"
LARGEST_BOUND = 8
PROMPT_IDS = np.arange(1, 9, dtype=np.int32)
PROMPT = Prompt(row_id="simulated:0", messages=(ChatMessage(role="user", content=(TextPart(text="question"),)),))
MEASURED = EncodedPrompt.of_text(PROMPT_IDS, PROMPT.row_id)


@dataclass(frozen=True)
class Workload:
    """One cell: servers, bound and mode, and what they work on. Times in seconds of the cell's clock."""

    servers: int
    bound: int | None
    """None: a random walk within [1, LARGEST_BOUND], another value every few steps."""
    on_stale: OnStale = "wait"
    steps: int = 48
    prompts_per_step: int = 64
    group_size: int = 4
    sequences: int = 256
    """Decoded together by all servers."""
    median_length: float = 8.0
    length_sigma: float = 1.0
    longest: int = 128
    seconds_per_token: float = 0.06
    learn_s: float = 1.0
    """From a full batch to the next version."""
    weights_s: tuple[float, float] = (0.05, 0.3)
    """Transfer of a version: drawn per server and version, uniformly."""
    latency_s: float = 0.005
    """Seconds of a message, one way."""
    weight_update: str = "recompute"
    seed: int = 1

    @property
    def total_groups(self) -> int:
        return self.steps * self.prompts_per_step

    @property
    def first_bound(self) -> int:
        return 1 if self.bound is None else self.bound

    @property
    def mean_length(self) -> float:
        """Expected tokens of a completion: its log-normal, rounded, at least 1, and a stop token, cut at `longest`."""
        tail = (self._longer_than(k) for k in range(self.longest))
        return math.fsum(tail)

    def _longer_than(self, tokens: int) -> float:
        body = tokens - 1  # the stop token
        if body < 1:
            return 1.0
        z = math.log((body + 0.5) / self.median_length) / self.length_sigma
        return 0.5 * math.erfc(z / math.sqrt(2))

    def config(self, **network: Any) -> RunConfig:
        """Configuration of learner and servers."""
        script = {
            "mean_length": self.median_length,
            "length_sigma": self.length_sigma,
            "seconds_per_token": self.seconds_per_token,
        }
        return RunConfig.model_validate(
            {
                "run_dir": "simulation",
                "model": {"path": "none"},
                "data": {"train_files": ["none"], "max_response_length": self.longest},
                "batch": {"prompts_per_step": self.prompts_per_step, "group_size": self.group_size},
                "learner": {
                    "max_staleness": LARGEST_BOUND if self.bound is None else self.bound,
                    "on_stale": self.on_stale,
                },
                "rollout": {
                    "engine": "scripted",
                    "engine_args": script,
                    "max_concurrent_sequences": self.sequences // self.servers,
                    "weight_update": self.weight_update,
                },
                "reward": {"functions": [{"function": "exact_match"}]},
                "alignment": {"rows": 0},
                "network": network,
                "telemetry": {"learner_port": 0, "rollout_port": 0},
            }
        )

    def write_ticket(self, slot: TicketSlot) -> PreparedTicket:
        ticket = Ticket(
            ticket_id=slot.ticket_id,
            kind=TicketKind.TRAIN,
            prompt=PROMPT,
            group_size=self.group_size,
            seed=ticket_seed(self.seed, slot.ticket_id),
            min_version=slot.version,
            sampling=Sampling(max_new_tokens=self.longest, stop_token_ids=(STOP_ID,)),
        )
        return PreparedTicket(ticket, {}, slot, MEASURED)


class TextlessProcessor:
    """Stand-in for a PromptProcessor: one prompt, and completions that nobody reads."""

    tokenizer = range(VOCABULARY)
    placeholder_ids = ()
    fingerprint = PROCESSOR
    template = SimpleNamespace(day="")

    def measure(self, prompt: Prompt, blobs: Any) -> EncodedPrompt:
        return MEASURED

    def decode(self, token_ids: np.ndarray) -> str:
        return ""


class OneForAll:
    """Stand-in for a RewardScorer: every sample scores 1."""

    dropped_bytes = 0

    @property
    def counts(self) -> dict[tuple[str, str], float]:
        return {}

    def group(self, size: int) -> OneForAll:
        return self

    async def score(self, index: int, sample: Any) -> Score:
        return Score({"exact_match": 1.0}, reward=1.0)


class ModelFreeEngine(ScriptedEngine):
    async def start(self) -> None:
        self._fingerprint = MODEL
