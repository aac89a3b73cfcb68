"""Weights from this process's device memory into another process's: each channel where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.messages import TransferEnd, TransferRequest, TransferStart
from tests.plugins.device_channels.device_channel_rig import LearnerHalf, some_weights, start_receiver

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two processes on one GPU; this takes two")


@pytest.mark.parametrize(
    ("channel", "learner", "receiver"),
    [
        pytest.param("nccl", "cpu", "cpu", id="cpu"),
        pytest.param("cuda_ipc", "cuda:0", "cuda:0", id="one-gpu", marks=pytest.mark.gpu),
        pytest.param("nccl", "cuda:0", "cuda:1", id="two-gpus", marks=[pytest.mark.gpu, TWO]),
    ],
)
def test_another_process_gets_every_bit(
    emptied_device: None, tmp_path: Path, channel: Any, learner: str, receiver: str
) -> None:
    """Two versions: the first comes from the published file, the second was kept on the device."""
    device = torch.device(learner)
    half = LearnerHalf(tmp_path, device, deadline_s=60.0)
    assert (half.device_weights.source is None) == (device.type == "cpu")
    try:
        for version in (1, 2):
            weights = {name: tensor.to(device) for name, tensor in some_weights(version, megabytes=150).items()}
            manifest = half.publish(version, weights)
            for tensor in weights.values():
                tensor.zero_()  # the next step
            request = TransferRequest(
                version=version, publication=manifest.publication, nonce=f"v{version}", channel=channel, receivers=1
            )
            start = half.device_weights.answer(b"receiver", request)
            assert isinstance(start, TransferStart)
            process = start_receiver(manifest, start, tmp_path, device=receiver)
            assert process.wait(timeout=120) == 0
            half.device_weights.end(b"receiver", TransferEnd(nonce=request.nonce))
    finally:
        half.close()
