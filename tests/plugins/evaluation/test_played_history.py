"""History of an episode in words, against the tokens of a run."""

from __future__ import annotations

import numpy as np

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.data.images import content_hash
from asyncrl.environments.observation import PastTurn
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.history import History
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.evaluation.played_history import PlayedHistory
from tests.unit.asyncrl.test_history import ASKED, FIRST, SECOND, THIRD, joined_ids, processor, rule, sampled, tool

__all__ = ["processor"]


def shown_images(run: History) -> list[str]:
    return [image_hash for piece in run.pieces for image_hash in piece.image_hashes]


def test_the_terminal_shows_the_history_that_a_run_has(processor: PromptProcessor) -> None:
    """`asyncrl env try` makes it of texts: new segments begin where a run's do, with the same texts and images."""
    bridge, draw = TurnBridge(processor, (processor.tokenizer.eos_token_id,)), np.random.default_rng(0)
    begun = 0
    for _ in range(60):
        settings = {"history": draw.choice(["whole", "strip_thinking"]), "keep_images": int(draw.integers(0, 3))}
        run, terminal = (
            History(bridge, rule(**settings), ASKED, pixels=False),
            PlayedHistory(EnvironmentConfig.model_validate(settings)),
        )
        for turn in range(4):
            text = str(draw.choice(["answer 1", "<think>a</think>read 2", "a</think>answer 3"]))
            observation = tool("see", *[FIRST, SECOND, THIRD][: draw.integers(0, 4)])
            edited = [PastTurn(None, "read 4", tool("left"))] if turn and draw.random() < 0.3 else []
            edited += [PastTurn(turn)] if edited or draw.random() < 0.2 else []
            run.add_turn(sampled(processor, text))
            before = shown_images(run)
            shown = run.after(observation, edited)
            run.show(observation, shown)
            rewritten = terminal.follow(text, observation, edited)
            assert bool(rewritten) == shown.begins_segment
            begun += bool(rewritten)
            if rewritten:
                before = [content_hash(image) for _, each in rewritten for image in each.images]
            assert [*before, *map(content_hash, observation.images)] == shown_images(run)
            said, place = processor.tokenizer.decode(joined_ids(run)), 0
            for past in (past for past, _ in rewritten):
                place = said.index(f"{past}{processor.tokenizer.eos_token}", place)
    assert begun > 50
