"""The history that a later turn is shown, and the segments of a trajectory that come of rewriting it.

The ticket's rule rewrites it, and an environment may edit it. A segment is a stretch of tokens behind the prompt that
only grows: what was sampled, and a bridge after each turn. Where the history is then not what the segment holds, a new
segment begins: the prompt again, and behind it all turns before as they are shown now. A turn is sampled, and trained,
in one segment; in later ones it is context.

Rollout server and learner follow the same rule on the same tokens, messages and images, and the learner compares.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.environments.observation import (
    THINKING_BEGINS,
    THINKING_ENDS,
    Observation,
    PastTurn,
    check_history,
    images_left_out,
    without_images,
)
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ConversationLimits, Prompt

_NOTHING = Observation(())


@dataclass(frozen=True)
class _Taken:
    """A turn, and what was shown after it."""

    token_ids: np.ndarray
    as_context: EncodedPrompt
    """The turn as later segments have it."""
    shown: Observation = _NOTHING


@dataclass(frozen=True)
class Shown:
    """Messages between a turn and the next one, or in a new segment before the next one."""

    pieces: tuple[EncodedPrompt, ...]
    """One bridge; or all turns before with their bridges, where a new segment begins. The last one is the bridge of the
    newest observation, with all of its images."""
    begins_segment: bool
    turns: tuple[_Taken, ...]
    """All turns before, as the environment has them now."""

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)

    @property
    def context(self) -> int:
        """`Turn.context` of the turn that follows."""
        return self.num_tokens if self.begins_segment else 0


class History:
    """The turns of one trajectory so far, and its current segment."""

    def __init__(self, bridge: TurnBridge, rule: ConversationLimits, prompt: Prompt, *, pixels: bool):
        """`pixels`: pieces have those of their images."""
        self._make = bridge.encode if pixels else bridge.measure
        self._rule = rule
        self._turn_bridge = bridge
        self._sampled: list[_Taken] = []
        """All turns by their number."""
        self._turns: list[_Taken] = []
        """Turns that later turns see, as the environment has them."""
        self._seen: set[bytes] = set()
        """Images of observations."""
        self._prompt_has_tools = any(message.role == "tool" for message in prompt.messages)
        self._bridges: dict[tuple[int, Observation, bool], EncodedPrompt] = {}
        """Cache of encoded last tokens and observations, each after results of tools or not: later turns ask again."""
        self.pieces: list[EncodedPrompt] = []
        """The current segment behind the prompt."""

    def add_turn(self, token_ids: np.ndarray) -> None:
        turn = self._taken(token_ids)
        self._sampled.append(turn)
        self._turns.append(turn)
        self.pieces.append(EncodedPrompt.of_text(token_ids))

    def after(self, observation: Observation, edited: Sequence[PastTurn] = ()) -> Shown:
        """Prompt of the next turn, where the observation comes after the last turn or after an edited history.

        Changes nothing. Raises UserError for images that the model cannot read, and for a history that cannot be.
        """
        turns = self._edited(edited) if edited else self._turns
        *before, newest = turns
        bridge = self._bridge(newest, observation, before)
        if not edited and self._rule.history == "whole" and not self._rule.keep_images:
            return Shown((bridge,), begins_segment=False, turns=tuple(turns))
        pieces: list[EncodedPrompt] = []
        left_out = images_left_out([turn.shown for turn in before], observation, self._rule.keep_images)
        for number, turn in enumerate(before):
            gone = min(left_out, len(turn.shown.images))
            left_out -= gone
            pieces += [turn.as_context, self._bridge(turn, without_images(turn.shown, gone), before[:number])]
        pieces.append(newest.as_context)
        if _same(pieces, self.pieces):
            return Shown((bridge,), begins_segment=False, turns=tuple(turns))
        return Shown((*pieces, bridge), begins_segment=True, turns=tuple(turns))

    def show(self, observation: Observation, shown: Shown) -> None:
        """Go on with what `after` has made of the observation."""
        *before, newest = shown.turns
        self._turns = [*before, replace(newest, shown=observation)]
        self._sampled[-1] = replace(self._sampled[-1], shown=observation)
        self._seen.update(observation.images)
        if shown.begins_segment:
            self.pieces = []
        self.pieces += shown.pieces

    def _edited(self, history: Sequence[PastTurn]) -> list[_Taken]:
        check_history(history, [turn.shown for turn in self._sampled], self._seen)
        turns: list[_Taken] = []
        for past in history:
            turn = self._taken(self._turn_bridge.said(past.text)) if past.turn is None else self._sampled[past.turn]
            turns.append(replace(turn, shown=turn.shown if past.shown is None else past.shown))
        return turns

    def _taken(self, token_ids: np.ndarray) -> _Taken:
        strips = self._rule.history == "strip_thinking"
        kept = without_thinking(token_ids, self._turn_bridge.processor) if strips else token_ids
        return _Taken(token_ids, EncodedPrompt.of_text(kept))

    def _bridge(self, turn: _Taken, observation: Observation, before: Sequence[_Taken]) -> EncodedPrompt:
        shown = (message for earlier in before for message in earlier.shown.messages)
        after_tools = self._prompt_has_tools or any(message.role == "tool" for message in shown)
        key = int(turn.token_ids[-1]), observation, after_tools
        if key not in self._bridges:
            self._bridges[key] = self._make(key[0], observation, after_tools=after_tools)
        return self._bridges[key]


def without_thinking(token_ids: np.ndarray, processor: PromptProcessor) -> np.ndarray:
    """A turn's tokens without what was thought: those behind the last `</think>`, as they were sampled. [T] -> [<= T]

    Of a token that holds the end of the tag and more, that text is tokenised. White space before the answer goes, too.
    Where no `<think>` was sampled the prompt has opened the thinking, and the tag that closes it stays. A turn without
    `</think>` stays as it is.
    """
    decode = processor.tokenizer.decode
    ids: list[int] = token_ids.tolist()
    text = decode(ids)
    tags = text.count(THINKING_ENDS)
    if not tags:
        return token_ids
    behind = bisect_left(range(len(ids) + 1), tags, key=lambda count: decode(ids[:count]).count(THINKING_ENDS))
    begun, _, rest = decode(ids[:behind]).rpartition(THINKING_ENDS)
    if THINKING_BEGINS not in begun:
        kept = [*processor.tokenize(THINKING_ENDS + rest), *ids[behind:]]
        return np.asarray(kept, np.int32)
    if not (rest := rest.lstrip()):
        while behind < len(ids) and decode(ids[behind : behind + 1]).isspace():
            behind += 1
    return np.asarray([*(processor.tokenize(rest) if rest else []), *ids[behind:]], np.int32)


def _same(pieces: Sequence[EncodedPrompt], others: Sequence[EncodedPrompt]) -> bool:
    """Whether both are the same tokens and images, however they are divided."""
    if [h for piece in pieces for h in piece.image_hashes] != [h for piece in others for h in piece.image_hashes]:
        return False
    one, other = (np.concatenate([piece.token_ids for piece in each]) for each in (pieces, others))
    return np.array_equal(one, other)
