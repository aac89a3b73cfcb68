"""Equal weights have equal log-probs wherever their file had them: a CPU's products round by addresses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config.sections import ModelConfig
from asyncrl.demo import model as demo_model
from asyncrl.devices.sleeping import Sleeper, fixed_tokens
from asyncrl.models.loading import ALIGNMENT_BYTES, load_model
from asyncrl.processing.encoded_prompt import EncodedPrompt
from rollout_server.engines.hf.decode_batch import prefill

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of the demo's width: the products of narrower ones round alike anywhere."""
    folder = tmp_path_factory.mktemp("model") / "model"
    demo_model.main(["--out", str(folder), "--layers", "2", "--vision-depth", "1"])
    return folder


def load_behind_header(folder: Path, longer_by: int) -> torch.nn.Module:
    """The model of a file whose header has so many bytes more."""
    weights = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt", "padding": "x" * longer_by})
    return load_model(ModelConfig(path=str(folder), dtype="float32"), device=CPU).eval()


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    """[T, V] of a few tokens."""
    prompt = EncodedPrompt.of_text(fixed_tokens(model.config.text_config.vocab_size, []))
    with torch.inference_mode():
        return prefill(model, [prompt], CPU).logits[0].float().log_softmax(-1)


def addresses(model: torch.nn.Module) -> set[int]:
    """Within a line of the cache."""
    return {tensor.data_ptr() % ALIGNMENT_BYTES for tensor in (*model.parameters(), *model.buffers())}


def test_headers_of_any_length_lead_to_the_same_bits(folder: Path) -> None:
    expected = None
    for longer_by in range(0, ALIGNMENT_BYTES, 8):
        model = load_behind_header(folder, longer_by)
        assert addresses(model) == {0}
        found = logprobs(model)
        expected = found if expected is None else expected
        assert torch.equal(found, expected), longer_by


@pytest.mark.parametrize(("dtype", "stays"), [("float32", True), ("bfloat16", False)])
def test_parameters_stay_in_their_file_until_they_are_taken_apart(folder: Path, dtype: str, stays: bool) -> None:
    """In the file's dtype."""
    config = ModelConfig(path=str(folder), dtype=dtype)
    model = load_model(config, device=CPU, stays_mapped=True)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    spans = [tuple(int(end, 16) for end in words[0].split("-")) for words in lines]
    for parameter in model.parameters():
        assert any(first <= parameter.data_ptr() < last for first, last in spans) == stays


@pytest.mark.parametrize("longer_by", [0, 8])
def test_sleep_changes_no_bit_of_what_a_model_says(folder: Path, tmp_path: Path, longer_by: int) -> None:
    model = load_behind_header(folder, longer_by)
    before = logprobs(model)
    sleeper = Sleeper("the model", CPU, tmp_path)
    sleeper.sleep(tensor for part in (model.parameters(), model.buffers()) for tensor in part)
    sleeper.wake()
    assert addresses(model) == {0}
    assert torch.equal(logprobs(model), before)
