"""What the learner writes into its run directory: metrics.jsonl, sampled completions, and the live status."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from asyncrl.config.schema import RunConfig
from asyncrl.models.processing import PromptProcessor
from asyncrl.rewards.presentation import plain_text
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.trackers import open_trackers
from learner.batch import Batch
from learner.exchange import Exchange
from learner.exporting import LearnerExporter
from learner.ledger import TicketLedger
from learner.tickets import ReceivedGroup
from protocol.lease import read_tenure
from protocol.messages import WeightManifest


class Reporter:
    def __init__(
        self,
        config: RunConfig,
        exchange: Exchange,
        ledger: TicketLedger,
        processor: PromptProcessor,
        exporter: LearnerExporter,
        total_steps: int,
    ):
        self.config = config
        self.exporter = exporter
        self.recorder = RunRecorder(
            config.run_path, open_trackers(config, exchange.errors)
        )  # after what may fail: it makes the run directory
        self._exchange = exchange
        self._ledger = ledger
        self._processor = processor
        self._total_steps = total_steps
        self._process = psutil.Process()
        self._began = time.monotonic()
        self._server_usage: dict[str, tuple[float, float, int]] = {}

    @property
    def evaluated_steps(self) -> set[int]:
        return self.recorder.evaluated_steps()

    def status(self, phase: str, step: int, version: int, waiting_for: str = "") -> None:
        counts = self._ledger.counts()
        servers = [
            {
                "id": server_id,
                "version": beat.version if beat else 0,
                "queued": beat.groups_queued if beat else 0,
                "running": beat.groups_running if beat else 0,
            }
            for server_id, server in list(self._exchange.servers.items())
            for beat in [server.heartbeat]
        ]
        self.recorder.status(
            phase=phase,
            waiting_for=waiting_for,
            step=step,
            total_steps=self._total_steps,
            version=version,
            servers=servers,
            groups={
                "issued": counts.issued,
                "in_flight": counts.in_flight + counts.waiting,
                "buffered": counts.buffered,
                "trained": counts.trained,
                "dropped": sum(counts.dropped.values()),
            },
            errors=dict(self._exchange.errors),
            device=_device(self.config),
        )

    def step(self, step: int, version: int, values: Mapping[str, float], batch: Batch) -> None:
        """One finished learner step; `version` is the one that consumed the batch."""
        uptime_s = time.monotonic() - self._began
        record = {"step": step, "version": version + 1, "time": time.time(), "uptime_s": uptime_s, **values}
        record |= self._rollout_usage()
        counts = self._ledger.counts()
        record["ledger_residual"] = counts.residual
        record |= self._ledger.length_bias()
        record["rss_gib"] = self._process.memory_info().rss / 2**30
        self.recorder.step(record)
        self.exporter.step(step, version, record, batch)
        self._sample(step, batch.received[: self.config.trainer.samples_per_step])

    def _rollout_usage(self) -> dict[str, float]:
        """Idle ratio and token rate of the servers since the last step, from their heartbeats."""
        idle: list[float] = []
        rate = 0.0
        for server_id, server in list(self._exchange.servers.items()):
            beat = server.heartbeat
            if beat is None:
                continue
            uptime, busy, tokens = self._server_usage.get(server_id, (0.0, 0.0, 0))
            elapsed = beat.uptime_s - uptime
            if elapsed > 0:
                idle.append(max(0.0, 1 - (beat.busy_s - busy) / elapsed))
                rate += (beat.tokens_generated - tokens) / elapsed
                self._server_usage[server_id] = (beat.uptime_s, beat.busy_s, beat.tokens_generated)
        return {"idle/rollout": float(np.mean(idle)), "tokens_per_s/rollout": rate} if idle else {}

    def published(self, manifest: WeightManifest) -> None:
        self.exporter.published(manifest)

    def parity(self, server_id: str, largest: float, mean: float) -> None:
        self.exporter.parity(server_id, largest, mean)

    def evaluated(self, step: int, version: int, received: Sequence[ReceivedGroup]) -> dict[str, Any]:
        """Accuracy and reward of a whole evaluation. Rows that could not be scored are counted apart."""
        records = [record for item in received for record in item.group.trajectories]
        scored = [record for record in records if record.reward is not None]
        rewards = [record.reward for record in records if record.reward is not None]
        name = self.config.reward.accuracy_component
        result = {
            "step": step,
            "version": version,
            "accuracy": float(np.mean([r.rewards[name] for r in scored])) if scored else float("nan"),
            "reward": float(np.mean(rewards)) if rewards else float("nan"),
            "rows": len(records),
            "errors": len(records) - len(scored),
        }
        self.recorder.evaluation(result)
        self.exporter.evaluated(result["accuracy"], result["reward"])
        return result

    def _sample(self, step: int, received: Sequence[ReceivedGroup]) -> None:
        for item in received:
            prompt, group = item.ticket.prompt, item.group
            bounds = np.concatenate([[0], np.cumsum(group.lengths)])
            completions = [
                {
                    "text": self._processor.decode(group.token_ids[start:end]),
                    "reward": record.reward,
                    "rewards": record.rewards,
                    "status": str(record.status),
                    "error": record.error_message,
                    "finish_reason": str(record.finish_reason),
                    "length": int(end - start),
                    "token_ids": group.token_ids[start:end].tolist(),
                }
                for record, start, end in zip(group.trajectories, bounds[:-1], bounds[1:], strict=True)
            ]
            first_frames = [video.frame_hashes[0] for video in prompt.videos]
            shown = {digest: item.prepared.blobs[digest] for digest in (*prompt.image_hashes, *first_frames)}
            self.recorder.sample(
                {
                    "step": step,
                    "row_id": prompt.row_id,
                    "prompt": plain_text(prompt.messages[-1]),
                    "answer": prompt.answer,
                    "images": list(prompt.image_hashes),
                    "videos": first_frames,
                    "completions": completions,
                },
                shown,
            )


def _device(config: RunConfig) -> dict[str, Any]:
    """Who has the device, where it is shared; empty elsewhere."""
    tenure = read_tenure(config.run_path) if config.trainer.mode == "sync" else None
    if tenure is None:
        return {}
    since_s = time.monotonic() - tenure.since
    return {
        "holder": tenure.holder if tenure.held else "",
        "pid": tenure.pid,
        "fence": tenure.fence,
        "since_s": since_s,
    }
