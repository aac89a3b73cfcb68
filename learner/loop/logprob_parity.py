"""The parity check, on the main thread: the log-probs of sampled tokens, computed again with the learner's weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.run_sections import AlignmentConfig
from asyncrl.config.service_sections import RolloutConfig
from asyncrl.devices.device import max_mean_logprob_difference
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import ReceivedGroup
from learner.network.parity_handshake import ParityCheck, ParityHandshake
from learner.ranks.commands import pack_groups
from learner.ranks.group import ALONE, Ranks
from learner.reporting.reporter import Reporter
from learner.training.batch import make_batch
from learner.training.engine import TorchEngine
from learner.training.packing import plan_micro_batches

logger = logging.getLogger(__name__)

FIX = (
    "Likely causes: other weights than the published ones (a stale prefix or encoder cache), another dtype, attention "
    "kernel or quantisation in the engine, log-probs of another distribution than `rollout` describes, completions "
    "that were tokenised again, other versions of transformers or the engine. Start both services with the same "
    "configuration and library versions; if the difference is rounding, raise alignment.max_logprob_difference"
)


@dataclass(frozen=True)
class Parity:
    """Differences between the engine's and the learner's log-probs of the same tokens, in nats."""

    largest: float
    mean: float
    kl: float
    """k3 estimate of KL(engine || learner) per token: the mismatch that no staleness explains."""
    tokens: int
    worst: str
    """Place of the largest difference: row, completion, token, and both log-probs."""


@torch.no_grad()
def compare(
    engine: TorchEngine, processor: PromptProcessor, received: Sequence[ReceivedGroup], tokens_per_microbatch: int
) -> Parity:
    """Compare groups that were sampled with the weights that the engine has now."""
    batch = make_batch(received, processor)
    learner = torch.full_like(batch.behaviour_logprobs, float("nan"))
    for part in plan_micro_batches(batch.train_groups, engine.tokens_at_once(tokens_per_microbatch)):
        packed = engine.pack(part)
        index = batch.flat_index(packed.row, packed.column)
        learner[index] = engine.forward(packed, as_sampled=True).logprobs.float().cpu()
    # A token that the learner could not compute is as wrong as can be.
    log_ratio = (learner - batch.behaviour_logprobs).double()
    difference = log_ratio.abs().nan_to_num(nan=float("inf"))
    place = int(difference.argmax())
    row = int(np.searchsorted(batch.row_start, place, side="right")) - 1
    token = int(np.concatenate([item.group.token_ids for item in received])[place])
    return Parity(
        largest=float(difference[place]),
        mean=float(difference.mean()),
        kl=float((log_ratio.expm1() - log_ratio).mean()),
        tokens=len(difference),
        worst=f"row {batch.name_rows([row])}, token {place - batch.row_start[row]} "
        f"({processor.tokenizer.decode([token])!r}, id {token}): "
        f"engine {float(batch.behaviour_logprobs[place]):.5f}, learner {float(learner[place]):.5f}",
    )


@dataclass
class ParityJudge:
    """Decides about complete checks while the main thread waits, between two steps."""

    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    alignment: AlignmentConfig
    limit: float
    """Accepted difference of one token's log-prob, in nats."""
    microbatch_tokens: int
    handshake: ParityHandshake
    call_soon: Callable[..., None]
    """Runs a method of the handshake on the network thread."""
    engine: TorchEngine
    processor: PromptProcessor
    reporter: Reporter
    ranks: Ranks = ALONE
    _largest_warned: float = 0.0

    def judge(self, version: int) -> None:
        """Compare what has come back; `version` is that of the learner's weights."""
        for check in self.handshake.take_complete():
            received = [check.groups[ticket_id] for ticket_id in check.tickets]
            if any((item.group.versions != version).any() for item in received):
                self.call_soon(self.handshake.repeat, check)
            else:
                self._decide(check, received, version)

    def _decide(self, check: ParityCheck, received: Sequence[ReceivedGroup], version: int) -> None:
        self.ranks.announce("compare", lambda: pack_groups(received))
        parity = compare(self.engine, self.processor, received, self.microbatch_tokens)
        self.reporter.parity(check.server_id, parity.largest, parity.mean)
        limit, mean_limit = self.limit, max_mean_logprob_difference(self.limit, self.rollout)
        numbers = (
            f"log-probs of engine and learner differ by at most {parity.largest:.3g} nats, {parity.mean:.3g} on "
            f"average, over {parity.tokens} tokens of {len(received)} rows at policy version {version}"
        )
        accepted = f"{limit:g} is accepted"
        if mean_limit < math.inf:
            numbers += f" (KL {parity.kl:.2g} per token: it samples with {self.rollout.quantization} weights)"
            accepted += f", and {mean_limit:g} on average"
        if parity.largest <= limit and parity.mean <= mean_limit:
            logger.info("%s is aligned: %s (%s)", check.server_id, numbers, accepted)
            self.call_soon(self.handshake.accept_server, check)
        else:
            accepted += " (alignment.max_logprob_difference)"
            reason = f"{numbers}; {accepted}. Largest at {parity.worst}"
            self.call_soon(self.handshake.refuse, check, reason, FIX)

    def watch(self, step: int, values: Mapping[str, float]) -> None:
        """Warn when tokens of the learner's own version disagree: something has gone stale since the server's check.

        Warns again only when the largest difference has doubled.
        """
        compared_at_start = self.algorithm.updates_per_batch == 1 or self.algorithm.proximal == "recompute"
        comparable = compared_at_start and not self.rollout.truncates and self.rollout.weight_update != "keep"
        largest = values.get("staleness_0/logprob_diff_max", 0.0)
        if not (self.alignment.rows and comparable):
            return
        if largest > max(self.limit, 2 * self._largest_warned):
            self._largest_warned = largest
            logger.warning(
                "step %d: log-probs of engine and learner differ by up to %.3g nats on tokens of the learner's own "
                "version, over alignment.max_logprob_difference = %g (ratio/*, mismatch_kl and ess of this step are "
                "in metrics.jsonl). %s",
                step,
                largest,
                self.limit,
                FIX,
            )
