"""A store of samples without a run: groups in memory, some of them with hostile text."""

from __future__ import annotations

import hashlib
import io

import numpy as np
from PIL import Image

from asyncrl.errors import UserError
from asyncrl_plugins.viewer.samples.model import (
    Page,
    SampleDetail,
    SampleImage,
    SampleQuery,
    SampleRow,
    SampleTurn,
    ShownMessage,
    TrajectoryDetail,
)
from protocol.messages import TokenSource, ToolCall

GROUPS, GROUP_SIZE = 60, 4
HOSTILE_TICKET, FORGOTTEN_TICKET, LONG_TICKET, AGREED_TICKET, CONVERSATION_TICKET = 3, 4, 5, 6, 8
HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>\x1b[31mred\x1b[0m\x07\u202eevil"
LONG = 9000


class MadeUpStore:
    """Answers as a SampleStore does. Step t trained ticket t, with rewards from -1 to 2."""

    def __init__(self) -> None:
        self.groups = {ticket_id: made_up_group(ticket_id) for ticket_id in range(1, GROUPS + 1)}
        self.closed = False

    def find(self, query: SampleQuery, *, limit: int = 50, offset: int = 0) -> Page:
        trajectories = (trajectory for detail in self.groups.values() for trajectory in detail.trajectories)
        rows = [trajectory.row for trajectory in trajectories if _fits(trajectory.row, query)]
        if query.order == "worst":
            rows.sort(key=lambda row: np.inf if row.reward is None else row.reward)
        elif query.order == "newest":
            rows.sort(key=lambda row: (-row.ticket_id, row.trajectory))
        return Page(tuple(rows[offset : offset + limit]), len(rows))

    def detail(self, ticket_id: int) -> SampleDetail:
        if ticket_id not in self.groups:
            raise UserError(f"there is no sample of ticket {ticket_id}")
        return self.groups[ticket_id]

    def close(self) -> None:
        self.closed = True


def png(shade: int, size: tuple[int, int] = (98, 28)) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", size, (shade, 40, 200)).save(target, "PNG")
    return target.getvalue()


def made_up_group(ticket_id: int) -> SampleDetail:
    prompt = f"<image>What is the largest digit? Question {ticket_id}"
    trajectories = tuple(_trajectory(ticket_id, number, prompt) for number in range(GROUP_SIZE))
    data = png(ticket_id)
    images = (SampleImage(hashlib.sha256(data).hexdigest(), data),)
    if ticket_id == HOSTILE_TICKET:
        prompt = HOSTILE
        images += (SampleImage("ab" * 32, b"<svg onload=alert(1)>"), SampleImage("cd" * 32, None, "it is gone"))
    talks = ticket_id == CONVERSATION_TICKET
    opening = (ShownMessage("user", ("Look first.", _picture(5, (56, 28)))),) if talks else ()
    return SampleDetail(
        ticket_id=ticket_id, server_id="server-1", row_id=f"rl.parquet:{ticket_id}",
        messages=({"role": "system", "content": "Answer briefly."}, {"role": "user", "content": prompt}),
        images=images, answer="9", trajectories=trajectories,
        problem="" if ticket_id != FORGOTTEN_TICKET else "Its tokens are no longer kept",
        opening=opening,
    )  # fmt: skip


def _trajectory(ticket_id: int, number: int, prompt: str) -> TrajectoryDetail:
    tokens = ("read", " 6", " 6", " 9", " answer", " 9", "<|im_end|>")
    if ticket_id == HOSTILE_TICKET:
        tokens = (HOSTILE, "\n", "\t", "", "plain")
    elif ticket_id == FORGOTTEN_TICKET:
        tokens = ()
    elif ticket_id == LONG_TICKET:
        tokens = tuple(f" {i}" for i in range(LONG))
    size = len(tokens)
    failed = number == 3 and ticket_id % 10 == 0
    row = SampleRow(
        ticket_id=ticket_id, trajectory=number, step=ticket_id, row_id=f"rl.parquet:{ticket_id}", prompt=prompt,
        answer="9", status="error" if failed else "truncated" if number == 3 else "finished", finish_reason="stop",
        reward=None if failed else number - 1.0, advantage=None if failed else 0.5 * number - 0.75,
        length=max(size, 7), staleness=ticket_id % 3, logprob_diff_max=0.01 * ticket_id,
        error=f"reward_exception: {HOSTILE}" if failed else "", has_payload=bool(tokens),
        completion="".join(tokens)[:200],
    )  # fmt: skip
    engine = np.linspace(-0.001, -6.0, size, dtype=np.float32)
    gaps = np.resize(np.float32([0, 0.05, -0.05, 0.2, -0.2, 0.5, -2.0]), size)
    if ticket_id == AGREED_TICKET:  # engine and learner agree to the noise
        gaps *= 0.005
    source, masked = np.full(size, TokenSource.POLICY, np.uint8), np.zeros(size, bool)
    source[1:2] = TokenSource.OBSERVATION
    masked[2:3] = True
    return TrajectoryDetail(
        row, rewards={"answer": float(number)}, tokens=tokens, token_ids=np.arange(size, dtype=np.int32),
        logprobs=engine, learner_logprobs=engine + gaps, source=source, masked=masked,
        versions=np.resize(np.int32([ticket_id, ticket_id - ticket_id % 3]), size),
        turns=_turns(number) if ticket_id == CONVERSATION_TICKET else (),
        limit="turns" if ticket_id == CONVERSATION_TICKET and number == 1 else "",
    )  # fmt: skip


def _turns(number: int) -> tuple[SampleTurn, ...]:
    """A call that shows a picture, and one that is wrong, before which a new segment repeats two tokens."""
    crop = ToolCall(name="crop", arguments='{"row": 1}', seconds=0.25)
    wrong = ToolCall(name="crop", arguments="{}", error_kind="arguments", error=HOSTILE)
    shown = ShownMessage("tool", (f"cell {number}: ", _picture(100 + number, (28, 84))))
    first = SampleTurn(0, 2, "stop", 0.5, (shown,), (crop,), '{"hit": true}')
    return first, SampleTurn(4, 7, "length", None, (), (wrong,), context=2)


def _picture(shade: int, size: tuple[int, int]) -> SampleImage:
    data = png(shade, size)
    return SampleImage(hashlib.sha256(data).hexdigest(), data)


def _fits(row: SampleRow, query: SampleQuery) -> bool:
    return (
        (query.steps is None or query.steps[0] <= row.step <= query.steps[1])
        and (query.rewards is None or (row.reward is not None and query.rewards[0] <= row.reward <= query.rewards[1]))
        and (not query.statuses or row.status in query.statuses)
        and (query.staleness is None or query.staleness[0] <= row.staleness <= query.staleness[1])
        and query.prompt.lower() in row.prompt.lower()
    )
