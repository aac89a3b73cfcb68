"""Copies between host and device in pinned buckets, with events as a GPU would have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.devices import host_copies
from asyncrl.devices.host_copies import PinnedBuckets, flat_bytes, host_pieces, to_host
from asyncrl.models.published import load_published, published_tensors, tensor_bytes

CPU = torch.device("cpu")


class LateBuckets(PinnedBuckets):
    """A copy happens when it is waited for, as late as a GPU may make it."""

    def __init__(self) -> None:
        super().__init__(CPU, pinned=False, bucket_bytes=100)
        self.events: list[str] = []

    def _begin(self, number: int, target: torch.Tensor, source: torch.Tensor) -> None:
        done: list[bool] = []

        def arrive() -> None:
            if not done:
                self.events.append(f"waited {number}")
                target.copy_(source)
                done.append(True)

        self.events.append(f"begun {number}")
        self._arrived[number] = arrive

    def synchronize(self) -> None:
        for arrived in self._arrived:
            arrived()


@pytest.mark.parametrize("nbytes", [0, 1, 100, 101, 350])
def test_every_byte_arrives_whenever_the_copies_happen(nbytes: int) -> None:
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    buckets, device = LateBuckets(), torch.zeros_like(source)
    assert torch.equal(torch.cat([piece.clone() for piece in buckets.to_host(source)] or [source]), source)
    kept = source.clone()
    buckets.to_device(source, device)
    source.zero_()  # the next version
    buckets.synchronize()
    assert torch.equal(device, kept)


def test_a_bucket_is_on_its_way_while_the_other_is_emptied() -> None:
    buckets, source = LateBuckets(), torch.arange(250, dtype=torch.uint8)
    for _ in buckets.to_host(source):
        pass
    assert buckets.events == ["begun 0", "begun 1", "waited 0", "begun 0", "waited 1", "waited 0"]


def test_published_weights_pass_the_buckets_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets, model = LateBuckets(), torch.nn.Linear(10, 10)
    on_gpu = {parameter.data_ptr() for parameter in model.parameters()}
    monkeypatch.setattr(host_copies, "_is_on_gpu", lambda tensor: tensor.data_ptr() in on_gpu)
    monkeypatch.setattr(host_copies, "_buckets", lambda device: buckets)
    version = {"weight": torch.randn(10, 10), "bias": torch.randn(10)}
    load_published(model, version.items())
    buckets.synchronize()
    assert buckets.events.count("begun 0") + buckets.events.count("begun 1") == 5
    buckets.events.clear()
    for name, tensor in published_tensors(model):
        assert bytes(tensor_bytes(tensor)) == version[name].numpy().tobytes()
        assert b"".join(map(bytes, host_pieces(tensor))) == version[name].numpy().tobytes()
    assert buckets.events.count("begun 0") + buckets.events.count("begun 1") == 10


def test_what_is_on_the_cpu_is_not_copied() -> None:
    tensor: Any = torch.randn(3, 4)
    assert to_host(tensor).data_ptr() == tensor.data_ptr()
    assert flat_bytes(torch.tensor(1.5, dtype=torch.bfloat16)).tolist() == [192, 63]
