"""The parity check, on the main thread: the log-probs of sampled tokens, computed again with the learner's weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.run_sections import AlignmentConfig
from asyncrl.config.service_sections import RolloutConfig
from asyncrl.devices.device import MEAN_SHARE
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import ReceivedGroup
from learner.network.parity_handshake import ParityCheck, ParityHandshake
from learner.ranks.commands import pack_groups
from learner.ranks.group import ALONE, Ranks
from learner.reporting.reporter import Reporter
from learner.training.batch import make_batch
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, plan_micro_batches

logger = logging.getLogger(__name__)

FROM_THE_START = (
    "Likely causes: images that the engine does not see as they are, another dtype, attention kernel or quantisation "
    "in the engine, log-probs of another distribution than `rollout` describes, completions that were tokenised again, "
    "other versions of transformers or the engine. Start both services with the same configuration and library "
    "versions; if the difference is rounding, raise alignment.max_logprob_difference"
)
SINCE_AN_UPDATE = (
    "It agreed before an update of the weights, which is the likely cause: a prefix or encoder cache that is not "
    "cleared, weights that are not loaded, or in part, an adapter that is not applied. Start the server again; an "
    "engine of your own clears its caches in `update_weights`"
)
CLEARLY = 4
"""Times that another policy's log-probs are nearer to the engine's than the learner's own, to be taken for its."""
GROWN = 10
"""Times that the mean difference is what it was as the server joined, to be worth a warning."""


@dataclass(frozen=True)
class Parity:
    """Differences between the engine's and the learner's log-probs of the same tokens, in nats."""

    largest: float
    mean: float
    kl: float
    """k3 estimate of KL(engine || learner) per token: the mismatch that no staleness explains."""
    worst: str
    """Place of the largest difference: row, completion, token, and both log-probs."""
    fits: str
    """Faulty policy whose log-probs the engine's clearly are; empty: none is known."""
    token_ids: np.ndarray
    """[M] that were compared."""
    logprobs: torch.Tensor
    """[2, M] of engine and learner."""

    def left_behind(self, before: Parity) -> str:
        """Say that the engine's log-probs of the same tokens have moved clearly less than the learner's, beyond what
        both differed by then; or nothing."""
        if not np.array_equal(self.token_ids, before.token_ids):
            return ""
        engine, learner = (self.logprobs - before.logprobs).abs().mean(1).tolist()
        if learner <= CLEARLY * max(engine, before.mean):
            return ""
        return f"they have moved by {engine:.2g} nats on average since then, the learner's by {learner:.2g}"


@torch.no_grad()
def compare(
    engine: TorchEngine, processor: PromptProcessor, received: Sequence[ReceivedGroup], tokens_per_microbatch: int
) -> Parity:
    """Compare groups that were sampled with the weights that the engine has now."""
    batch = make_batch(received, processor)
    learner = torch.full_like(batch.behaviour_logprobs, float("nan"))
    others: dict[str, torch.Tensor] = {}
    for part in plan_micro_batches(batch.train_groups, engine.tokens_at_once(tokens_per_microbatch)):
        packed = engine.pack(part)
        index = batch.flat_index(packed.row, packed.column)
        learner[index] = _logprobs(engine, packed)
        for name, logprobs in _faulty_policies(engine, packed):
            others.setdefault(name, torch.full_like(learner, float("nan")))[index] = logprobs
    # A token that the learner could not compute is as wrong as can be.
    log_ratio = (learner - batch.behaviour_logprobs).double()
    difference = log_ratio.abs().nan_to_num(nan=float("inf"))
    place = int(difference.argmax())
    row = int(np.searchsorted(batch.row_start, place, side="right")) - 1
    token_ids = np.concatenate([item.group.token_ids for item in received])
    token = int(token_ids[place])
    others = {name: torch.where(other.isnan(), learner, other) for name, other in others.items()}
    means = {name: (other - batch.behaviour_logprobs).double().abs().mean() for name, other in others.items()}
    return Parity(
        largest=float(difference[place]),
        mean=float(difference.mean()),
        kl=float((log_ratio.expm1() - log_ratio).mean()),
        worst=f"row {batch.name_rows([row])}, token {place - batch.row_start[row]} "
        f"({processor.tokenizer.decode([token])!r}, id {token}): "
        f"engine {float(batch.behaviour_logprobs[place]):.5f}, learner {float(learner[place]):.5f}",
        fits=next((name for name, mean in means.items() if CLEARLY * mean < difference.mean()), ""),
        token_ids=token_ids,
        logprobs=torch.stack([batch.behaviour_logprobs, learner]),
    )


def _logprobs(engine: TorchEngine, packed: MicroBatch) -> torch.Tensor:
    """[n] fp32 on the CPU."""
    return engine.forward(packed, as_sampled=True).logprobs.float().cpu()


def _faulty_policies(engine: TorchEngine, packed: MicroBatch) -> Iterator[tuple[str, torch.Tensor]]:
    """Log-probs [n] that an engine with a known fault would have, behind what they are."""
    pixels = {name: torch.zeros_like(value) for name, value in packed.inputs.items() if name.startswith("pixel_values")}
    for value in pixels.values():
        if value.ndim == 5:  # [rows, images, channels, height, width]: without one pixel Idefics3 takes it for padding
            value[..., 0, 0, 0] = 2**-10
    if pixels:
        grey = replace(packed, inputs={**packed.inputs, **pixels})
        yield "those of grey images in place of the prompts' own", _logprobs(engine, grey)
    if engine.adapter is not None:
        with engine.reference():
            yield "those of the base model without the adapter", _logprobs(engine, packed)


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
    _first: dict[str, tuple[int, Parity]] = field(default_factory=dict)
    """Version and result of the first check that each server has passed."""

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
        limit, mean_limit = self.limit, MEAN_SHARE * self.limit
        numbers = (
            f"log-probs of engine and learner differ by at most {parity.largest:.3g} nats, {parity.mean:.3g} on "
            f"average, over {parity.token_ids.size} tokens of {len(received)} rows at policy version {version}"
        )
        accepted = f"{limit:g} is accepted, and {mean_limit:g} on average"
        if self.rollout.quantization:
            numbers += f" (KL {parity.kl:.2g} per token: it samples with {self.rollout.quantization} weights)"
        first, at_first = self._first.get(check.server_id, (version, parity))
        again, fault = check.server_id in self._first, self._known_fault(parity, first, at_first)
        is_close = parity.largest <= limit
        if not fault and parity.mean <= mean_limit and (is_close or again):
            logger.info("%s is aligned: %s (%s)", check.server_id, numbers, accepted)
            if not is_close or parity.mean > GROWN * at_first.mean > 0:  # single tokens end no run at work
                logger.warning(
                    "%s: log-probs of engine and learner differed by %.2g nats on average at version %d, and by %.2g "
                    "at version %d. Largest at %s. %s",
                    *(check.server_id, at_first.mean, first, parity.mean, version, parity.worst, SINCE_AN_UPDATE),
                )
            self._first.setdefault(check.server_id, (version, parity))
            keeps = self.rollout.weight_update == "keep"  # and cached prefixes of versions before, where there are any
            self.call_soon(partial(self.handshake.accept_server, once=keeps), check)
        else:
            accepted += " (alignment.max_logprob_difference)"
            reason = f"{fault}{numbers}; {accepted}. Largest at {parity.worst}"
            self.call_soon(self.handshake.refuse, check, reason, SINCE_AN_UPDATE if again else FROM_THE_START)

    def _known_fault(self, parity: Parity, first: int, at_first: Parity) -> str:
        """The policy that the engine has in place of the published one, also where the limit would let it pass."""
        faults = [parity.fits] if parity.fits else []
        # Rounded weights need not move where the learner's do.
        if not self.rollout.quantization and (behind := parity.left_behind(at_first)):
            faults.append(f"nearer to those of version {first}: {behind}")
        return f"its log-probs are {', and '.join(faults)}. The " if faults else ""

    def watch(self, step: int, values: Mapping[str, float]) -> None:
        """Warn when tokens of the learner's own version disagree, and have all servers checked again: something has
        gone stale since.

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
                "in metrics.jsonl); every server is checked again. %s",
                *(step, largest, self.limit, SINCE_AN_UPDATE),
            )
            self.call_soon(self.handshake.check_again)
