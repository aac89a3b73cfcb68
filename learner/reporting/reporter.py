"""The reporter: the learner's files in its run directory (metrics, samples, evaluations, status) and its exporter."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from asyncrl.config.run_sections import TrainerConfig
from asyncrl.data.survey.row_survey import BadRow
from asyncrl.devices.device import device_name, memory_by_state
from asyncrl.environments.recording import describe_conversations
from asyncrl.plugins import descriptions, implementation
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.score import accuracy_and_reward, evaluation_scores, label_values
from asyncrl.telemetry.host_versions import record_start
from asyncrl.telemetry.recorder import BackgroundWriter, RunRecorder
from asyncrl.telemetry.wasted_steps import FEW_GROUPS, LEAST_STEPS, WAYS_OUT, few_groups_left
from learner.groups.ticket import ReceivedGroup
from learner.network.thread import NetworkThread
from learner.reporting.exporter import LearnerExporter
from learner.reporting.samples import SampleWriter, sample_of_group
from learner.tickets.evaluation import Evaluation
from learner.tickets.ledger import LedgerCounts, TicketLedger
from learner.training.batch import Batch, TrainedBatch
from protocol.device_lock import read_tenure

logger = logging.getLogger(__name__)

ENDINGS = ("finished", "interrupted", "failed")


class Reporter:
    """Writes what happens in a run. Samples are written by a background thread."""

    def __init__(
        self,
        recorder: RunRecorder,
        network: NetworkThread,
        ledger: TicketLedger,
        processor: PromptProcessor,
        exporter: LearnerExporter,
        total_steps: int,
        *,
        trainer: TrainerConfig,
        accuracy: str,
        group_size: int,
        has_turns: bool,
        held_out_labels: Sequence[str] = (),
    ):
        """`accuracy` is the reward's component that is reported as accuracy, `group_size` that of an evaluation.
        `has_turns`: an environment answers. `held_out_labels`: of each held-out row, where scores are told apart."""
        self.exporter = exporter
        self.recorder = recorder
        self._trainer = trainer
        self._accuracy, self._group_size, self._has_turns = accuracy, group_size, has_turns
        self._labels = held_out_labels
        parts = descriptions("sample_writers").values()
        self._samples: list[SampleWriter] = [implementation(part.implementation)(recorder.run_path) for part in parts]
        self._behind = BackgroundWriter("samples")
        self._network = network
        self._ledger = ledger
        self._processor = processor
        self._total_steps = total_steps
        self._process = psutil.Process()
        self._device = torch.device("cpu")
        self._began = time.monotonic()
        self._bad_rows: dict[str, int] = {}
        self._held_out_trained = 0
        self._inputs_changed, self._scoring_changes, self._changed_after = "", 0, list[int]()
        self._unscored = ""
        """Error of the newest trajectory without a score."""
        counts = ledger.counts()
        self._judged_before = sum(counts.dropped.values()) - counts.dropped["stale"], counts.trained
        """Groups that filters had dropped, and trained ones, at the last record."""
        self._first: list[dict[str, Any]] = []
        """The first LEAST_STEPS steps of this process that were not made again from the journal."""
        self._newest = deque[dict[str, Any]](maxlen=LEAST_STEPS)
        self._told_of_filters = False
        self._server_usage: dict[str, tuple[float, float, int]] = {}
        self._parity: dict[str, dict[str, float]] = {}
        """Largest and mean difference by server, gone ones included: one that only was away is not compared again."""

    def close(self) -> None:
        try:
            for samples in self._samples:
                self._behind.do(samples.close)
            self._behind.close()
        finally:
            self.recorder.close()

    def truncate_after(self, step: int, *, made_again: int) -> None:
        """Remove what was written past the step that the run resumes from.

        Steps up to `made_again` will be made again, exactly: their evaluations and samples stay.
        """
        self.recorder.truncate_after(step, evaluations_after=made_again)
        for evaluation in self.recorder.evaluations():
            self.exporter.evaluated(evaluation)
        for samples in self._samples:
            self._behind.do(samples.truncate_after, made_again)
        self._behind.wait()

    def ends_at(self, step: int) -> None:
        """Note that the run ends with this step, before the planned one."""
        self._total_steps = step
        self.exporter.ends_at(step)

    def finish_samples(self) -> None:
        """Wait for the samples of the steps so far: once a checkpoint holds them they are not made again."""
        self._behind.wait()

    def forget_tokens(self, before_step: int) -> None:
        """Remove token values of earlier steps: the journal keeps no groups of them."""
        for samples in self._samples:
            self._behind.do(samples.forget_tokens, before_step)

    @property
    def evaluated_steps(self) -> set[int]:
        """Steps whose evaluation is recorded."""
        return {int(evaluation["step"]) for evaluation in self.recorder.evaluations()}

    def started(self, step: int, device: torch.device, **more: Any) -> None:
        """Record this process, which starts after `step`, and `more`: its configuration is accepted."""
        self._device = device
        record_start(self.recorder.run_path, step, device_name(device), **more)

    def rows(self, bad: Sequence[BadRow], *, held_out_trained: int) -> None:
        """Record the rows that the run leaves out, and how many held-out prompts are trained on, too."""
        self.recorder.bad_rows([vars(row) for row in bad])
        self._bad_rows = dict(Counter(row.source for row in bad))
        self._held_out_trained = held_out_trained
        if held_out_trained:
            logger.warning("%d held-out prompts are trained on, too: hold other rows out", held_out_trained)
        self.exporter.bad_rows(self._bad_rows)

    def inputs(self, changed: str, *, scoring_changes: int, after: list[int]) -> None:
        """Record what `--accept-changes` has `changed` in this start; empty for nothing. Evaluations from now on are
        marked with `scoring_changes`, which counts the changes of rewards and held-out rows in the whole run; steps
        with the number of changes, rows' too, `after` an earlier step."""
        self._inputs_changed, self._scoring_changes, self._changed_after = changed, scoring_changes, after
        if changed:
            logger.warning("%s", changed)

    def status(self, phase: str, step: int, version: int, waiting_for: str = "") -> None:
        """Write status.json; at the end of a run also what is left of the timeline."""
        counts = self._ledger.counts()
        self.recorder.status(
            phase=phase,
            waiting_for=waiting_for,
            step=step,
            total_steps=self._total_steps,
            version=version,
            servers=self._servers(),
            groups={
                "issued": counts.issued,
                "in_flight": counts.in_flight + counts.waiting,
                "buffered": counts.buffered,
                "trained": counts.trained,
                "dropped": sum(counts.dropped.values()),
            },
            errors=dict(self._network.servers.errors),
            unscored=self._unscored,
            bad_rows=self._bad_rows,
            held_out_trained=self._held_out_trained,
            inputs_changed=self._inputs_changed,
            device=_device_holder(self.recorder.run_path) if self._trainer.mode == "sync" else {},
        )
        if phase in ENDINGS:
            self._rollout_usage()
            self._write_timeline()

    def _servers(self) -> list[dict[str, Any]]:
        """One entry of status.json for each server; `weights` is empty before it has any."""
        entries: list[dict[str, Any]] = []
        for server_id, server in list(self._network.servers.connected.items()):
            beat, loaded = server.heartbeat, server.loaded
            entries.append(
                {
                    "id": server_id,
                    "engine": server.hello.engine,
                    "quantization": server.hello.quantization,
                    "version": beat.version if beat else 0,
                    "queued": beat.groups_queued if beat else 0,
                    "running": beat.groups_running if beat else 0,
                    "weights": loaded.model_dump(include={"channel", "transfer_s", "load_s"}) if loaded else {},
                    "parity": self._parity.get(server_id, {}),
                }
            )
        return entries

    def step(self, step: int, version: int, values: Mapping[str, float], batch: Batch, trained: TrainedBatch) -> None:
        """Record a finished learner step; `version` is the one that consumed the batch."""
        uptime_s = time.monotonic() - self._began
        record = {"step": step, "version": version + 1, "time": time.time(), "uptime_s": uptime_s, **values}
        record |= self._rollout_usage()
        if self._changed_after:
            record["input_changes"] = sum(earlier < step for earlier in self._changed_after)
        counts = self._ledger.counts()
        record["ledger_residual"] = counts.residual
        record |= self._dropped(counts)
        record |= self._ledger.length_bias()
        record["cpu_threads"] = torch.get_num_threads()  # the last bits of a sum depend on it
        record["rss_gib"] = self._process.memory_info().rss / 2**30
        if self._device.type == "cuda":
            record |= {f"device_gib/{state}": n / 2**30 for state, n in memory_by_state(self._device).items()}
        trajectories = [record for item in batch.received for record in item.group.trajectories]
        if one := next((record for record in trajectories if record.reward is None), None):
            self._unscored = f"{one.error_kind}: {one.error_message}"
            if all(record.reward is None for record in trajectories):
                logger.warning("no trajectory of step %d could be scored: it teaches nothing. %s", step, self._unscored)
        self.recorder.step(record)
        self._watch_filters(record)
        self.exporter.step(step, version, record, batch)
        new = [item for item in batch.received if not item.is_replayed]  # which come first
        for item in new[: self._trainer.samples_per_step]:
            self._behind.do(self._sample, step, item)
        groups = [(item.ticket.prompt, item.group) for item in new]
        for samples in self._samples:
            self._behind.do(samples.write, step, version, groups, trained)
        self._write_timeline()

    def _dropped(self, counts: LedgerCounts) -> dict[str, float]:
        """Dropped groups by reason, and the share of those that filters dropped since the last record; nothing where
        none was ever dropped."""
        reasons = {reason: number for reason, number in counts.dropped.items() if number}
        if not reasons:
            return {}
        filtered = sum(reasons.values()) - counts.dropped["stale"]
        before, self._judged_before = self._judged_before, (filtered, counts.trained)
        new, trained = filtered - before[0], counts.trained - before[1]
        share = {"filtered_share": new / (new + trained)} if new + trained else {}
        return {f"dropped/{reason}": float(number) for reason, number in reasons.items()} | share

    def _watch_filters(self, record: dict[str, Any]) -> None:
        """Log once in this process that filters leave few groups, and what may help."""
        self._newest.append(record)
        if record.get("publish_bytes") and len(self._first) < LEAST_STEPS:  # not made again from the journal
            self._first.append(record)
        if not self._told_of_filters and (found := few_groups_left(self._first, self._newest)):
            self._told_of_filters = True
            logger.warning("%s: %s. %s", FEW_GROUPS, found, WAYS_OUT)

    def _write_timeline(self) -> None:
        self.recorder.timeline(self._network.timeline.take())

    def _rollout_usage(self) -> dict[str, float]:
        """Idle ratio and token rate of the servers since the last step, from their heartbeats."""
        idle: list[float] = []
        rate = 0.0
        for server_id, server in list(self._network.servers.connected.items()):
            beat = server.heartbeat
            if beat is None:
                continue
            uptime, busy, tokens = self._server_usage.get(server_id, (0.0, 0.0, 0))
            elapsed = beat.uptime_s - uptime
            if elapsed > 0:
                idle.append(max(0.0, 1 - (beat.busy_s - busy) / elapsed))
                rate += (beat.tokens_generated - tokens) / elapsed
                hello = server.hello
                more = {"engine": hello.engine, "version": beat.version, "busy_s": round(beat.busy_s - busy, 3)}
                more["tokens"] = beat.tokens_generated - tokens
                if hello.quantization:
                    more["quantization"] = hello.quantization
                self._network.timeline.ended(server_id, "usage", elapsed, **more)
                self._server_usage[server_id] = (beat.uptime_s, beat.busy_s, beat.tokens_generated)
        return {"idle/rollout": float(np.mean(idle)), "tokens_per_s/rollout": rate} if idle else {}

    def parity(self, server_id: str, largest: float, mean: float) -> None:
        self._parity[server_id] = {"largest": largest, "mean": mean}
        self.exporter.compared(server_id, largest, mean)

    def evaluated(self, evaluation: Evaluation, waited_s: float) -> dict[str, Any]:
        """Scores of a whole evaluation. Completions that could not be made or scored are counted apart.

        `waited_s`: the part of its wall-clock time in which the learner could do nothing else.
        """
        name, size = self._accuracy, self._group_size
        records = evaluation.records()
        answered = [record for row in records for record in row] if self._has_turns else []
        rows = [
            [accuracy_and_reward(record.rewards, record.reward, name) for record in row] or [None] * size
            for row in records
        ]
        result = {
            "step": evaluation.step,
            "version": evaluation.version,
            "scoring_changes": self._scoring_changes,
            **asdict(evaluation_scores(rows)),
            "group_size": size,
            "seconds": evaluation.seconds,
            "waited_s": waited_s,
            **label_values(self._labels, rows),
            **(describe_conversations(answered) if answered else {}),
        }
        self.recorder.evaluation(result)
        self.exporter.evaluated(result)
        return result

    def _sample(self, step: int, item: ReceivedGroup) -> None:
        """Record this group with its texts and images."""
        self.recorder.sample(*sample_of_group(item, step, self._processor.decode))


def _device_holder(run_path: Path) -> dict[str, Any]:
    """The process that has a shared device; empty before the first turn."""
    tenure = read_tenure(run_path)
    if tenure is None:
        return {}
    holder = tenure.holder if tenure.held else ""
    return {"holder": holder, "pid": tenure.pid, "fence": tenure.fence, "since_s": time.monotonic() - tenure.since}
