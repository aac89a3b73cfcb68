"""Families of images: engine, learner and the family's own processor and model agree on every number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.models.loading import load_model
from asyncrl.models.parts import part_of
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from asyncrl.processing.encoded_prompt import media_arguments
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import ReceivedGroup
from learner.training.batch import make_batch
from learner.training.roles import Roles
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.alignment_rig import answer, learner_engine, parity_tickets, verify
from tests.rigs.pictures import picture
from tests.rigs.tiny_families import make_llava
from tests.system.test_bad_input import image_rows, write_rows
from tests.unit.asyncrl.test_measured_prompts import prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
SIZES = [(40, 150), (28, 28), (90, 40), (160, 200)]
"""Of the images in the rows: height and width in pixels."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plug-in's tests have other families."""
    return make_llava(tmp_path_factory.mktemp("llava"))


def rows_of_none_one_and_three_images(make_config: MakeConfig, model: Path, folder: Path) -> RunConfig:
    return make_config(
        model={"path": str(model)},
        data={**write_rows(folder, image_rows(folder, SIZES)), "max_prompt_length": 400},
        rollout={"temperature": 0.8},
        alignment={"rows": 3},
        batch={"prompts_per_step": 3, "group_size": 2},
    )


def separately(model: Any, processor: PromptProcessor, config: RunConfig, one: ReceivedGroup) -> list[torch.Tensor]:
    """Log-probs of each completion from a plain pass over what the family's own processor makes of the prompt."""
    group, prompt = one.group, one.prepared.ticket.prompt
    images = media_arguments([prompt], {name: bytes(data) for name, data in one.prepared.blobs.items()})
    arguments = {name: [values] for name, values in images.items()}
    made = processor.processor(
        text=[processor.render(prompt)], **arguments, add_special_tokens=False, return_tensors="pt"
    )
    del made["attention_mask"]
    banned = torch.tensor(sorted(processor.placeholder_ids))
    found: list[torch.Tensor] = []
    for index in range(2):
        ids = torch.from_numpy(group.token_ids[group.span(index)].astype(np.int64))
        inputs = {**made, "input_ids": torch.cat([made["input_ids"], ids[None]], dim=1)}
        if "pixel_values" in made:  # some processors round them
            inputs["pixel_values"] = made["pixel_values"].to(model.dtype)
        if "token_type_ids" in made:
            inputs["token_type_ids"] = torch.nn.functional.pad(made["token_type_ids"], (0, len(ids)))
        logits = model(**inputs, use_cache=False).logits[0, -len(ids) - 1 : -1]
        logprobs = sampling_logprobs(logits, temperature=config.rollout.temperature, banned=banned)
        found.append(gather_logprobs(logprobs, ids))
    return found


def test_a_family_is_sampled_verified_and_trained_as_its_own_model_computes(
    make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    """Rows of no, one and three images: ids, the engine's log-probs, the learner's in a packed micro-batch (row by row
    for a family that it does not pack), and their gradients are those of the released processor and a plain pass."""
    config = rows_of_none_one_and_three_images(make_config, folder, tmp_path)
    processor = PromptProcessor(config.model)
    received = answer(HFEngine(config, processor), processor, parity_tickets(config, processor))
    assert sorted(len(one.group.image_grids) for one in received) == [0, 1, 3]
    for one in received:
        verify(one)
    batch, learner = make_batch(received, processor), learner_engine(config)
    roles = Roles(learner)
    parts = list(roles.micro_batches(roles.plan(batch.train_groups, 4096)))
    assert (len(parts) == 1) == learner.packs
    order = torch.cat([part.row * 4096 + part.column for part in parts]).argsort()
    logprobs = torch.cat([learner.forward(part).logprobs for part in parts])[order]
    plain: Any = load_model(config.model, device=torch.device("cpu")).train()
    alone = torch.cat([part for one in received for part in separately(plain, processor, config, one)])
    assert len(alone) == len(logprobs) >= 6
    engines = torch.cat([torch.from_numpy(one.group.logprobs.copy()) for one in received])
    torch.testing.assert_close(engines, alone.detach(), atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs, alone, atol=1e-5, rtol=1e-5)

    direction = torch.randn(len(alone), generator=torch.Generator().manual_seed(0))
    learner.backward((logprobs * direction).sum())
    (alone * direction).sum().backward()
    theirs = dict(plain.named_parameters())
    largest = max(float(p.grad.norm()) for p in theirs.values() if p.grad is not None)
    for name, parameter in learner.model.named_parameters():
        grad = theirs[name].grad
        assert (parameter.grad is None) == (grad is None), name
        if grad is not None:
            scale = max(float(grad.norm()), 1e-4 * largest)  # that of a key's bias is 0 but for rounding
            assert float((parameter.grad - grad).norm()) / scale < 1e-3, name
    moved = {part_of(name.split(".")) for name, p in learner.model.named_parameters() if p.grad is not None}
    assert moved == {"vision_tower", "connector", "language_model"}


def test_any_size_is_measured_as_the_processor_cuts_it(folder: Path) -> None:
    processor = PromptProcessor(ModelConfig(path=str(folder)), cache_mib=0)
    draw = np.random.default_rng(0)
    sizes = [(3, 150), (150, 3), (28, 28), (29, 28), (56, 57), *map(tuple, draw.integers(3, 200, (7, 2)).tolist())]
    for first, count in itertools.product(range(0, len(sizes), 2), (1, 2)):
        prompt, blobs = prompt_of(*(picture(*size) for size in sizes[first : first + count]))
        measured, encoded = processor.measure(prompt, blobs), processor.encode(prompt, blobs)
        images = [media_arguments([prompt], blobs)["images"]]
        whole = processor.processor(
            text=[processor.render(prompt)], images=images, add_special_tokens=False, return_tensors="pt"
        )
        for one in (measured, encoded):
            assert one.token_ids.tolist() == whole["input_ids"][0].tolist()
            assert one.media_tokens == int((whole["input_ids"] == processor.image_token_id).sum())


def test_a_prompt_with_too_few_placeholders_is_refused(folder: Path) -> None:
    processor = PromptProcessor(ModelConfig(path=str(folder)))
    processor.processor.chat_template = processor.tokenizer.chat_template = "{% for m in messages %}x{% endfor %}"
    prompt, blobs = prompt_of(picture(40, 40))
    with pytest.raises(UserError, match=r"the rendered prompt has 0 image tokens, but its 1 image\(s\) need \d+"):
        processor.measure(prompt, blobs)
