"""The process of a judge, `python -m asyncrl_plugins.judges.judge`: it asks an OpenAI-compatible endpoint for scores.

Requests are asked for side by side, as many as are sent. A reply without a usable score is an error of its
completions, never a 0. Requests of the same content are asked once (`cache`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import random
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import aiohttp

from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score, samples_of, scores_of
from asyncrl.user_functions import one_line, shorten
from asyncrl.workers.channel import Channel, Serve, run_worker
from asyncrl_plugins.judges.judge_settings import JudgeSettings
from protocol.nesting import read_json

CACHED_REPLIES = 65536
MAX_BODY_BYTES = 4 << 20
"""A longer answer comes from no judge."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
"""Delay before the first further try, and the longest one."""
IMAGE_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}


class UnusableReply(Exception):
    """The endpoint refused, could not be reached, or said nothing that is a score."""


class Judge:
    def __init__(self, name: str, settings: JudgeSettings, session: aiohttp.ClientSession) -> None:
        self._name = name
        self._settings = settings
        self._session = session
        self._template = settings.template()
        self._replies: OrderedDict[str, asyncio.Task[str]] = OrderedDict()
        """Replies by hash of the request, the newest last; those on their way among them."""
        self._counts: Counter[str] = Counter()

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request: one score for each of its completions, or what they failed of."""
        samples, scores, started = samples_of(request), scores_of(request), time.perf_counter()
        try:
            reply = await self._reply_to(self.body(samples))
            values = read_scores(reply, len(samples), self._settings)
            scores = [score.plus(self._name, value) for score, value in zip(scores, values, strict=True)]
        except TimeoutError:
            scores = self._failed(scores, "reward_timeout", f"was not done after {self._settings.timeout_s:g} s")
        except UnusableReply as unusable:
            scores = self._failed(scores, "reward_judge", str(unusable))
        except Exception as error:  # of the template
            scores = self._failed(scores, "reward_exception", one_line(error, self._settings.prompt))
        counts, self._counts = self._counts, Counter()
        seconds, found = time.perf_counter() - started, list(map(vars, scores))
        return {"id": request["id"], "seconds": seconds, "scores": found, "counts": dict(counts)}

    def _failed(self, scores: Sequence[Score], kind: str, message: str) -> list[Score]:
        self._counts["requests/failed"] += 1
        return [score.failed(kind, f"reward component {self._name!r}: {message}") for score in scores]

    def body(self, samples: Sequence[RewardSample]) -> bytes:
        """The request for completions of one prompt."""
        settings, row = self._settings, samples[0]
        text = self._template.render(
            prompt=row.prompt,
            messages=row.messages,
            answer=row.answer,
            columns=row.columns,
            completion=row.completion,
            completions=[sample.completion for sample in samples],
            lowest=f"{settings.lowest:g}",
            highest=f"{settings.highest:g}",
        )
        images = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in row.images]
        content = [*images, {"type": "text", "text": text}] if settings.images and images else text
        request = {
            "model": settings.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            **settings.parameters,
        }
        return json.dumps(request, sort_keys=True).encode()  # ASCII: also half a surrogate pair travels

    async def _reply_to(self, body: bytes) -> str:
        """The text of the judge's reply. Raises UnusableReply, TimeoutError."""
        if not self._settings.cache:
            return await self._ask(body)
        key = hashlib.sha256(body).hexdigest()
        asked = self._replies.get(key)
        if asked is not None:
            self._replies.move_to_end(key)
            self._counts["requests/cached"] += 1
            return await asked
        asked = self._replies[key] = asyncio.create_task(self._ask(body))
        if len(self._replies) > CACHED_REPLIES:
            self._replies.popitem(last=False)
        try:
            return await asked
        except BaseException:
            self._replies.pop(key, None)
            raise

    async def _ask(self, body: bytes) -> str:
        async with asyncio.timeout(self._settings.timeout_s):
            tries = 0
            while True:
                tries += 1
                wait_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (tries - 1)) * random.uniform(0.5, 1.0)
                try:
                    status, headers, said = await self._post(body)
                except (aiohttp.ClientError, OSError) as error:
                    problem = f"{self._settings.endpoint} cannot be reached: {one_line(error)}"
                else:
                    if status == 200:
                        return self._content(said)
                    problem = f"{self._settings.endpoint} answered {status}: {_shown(said)}"
                    if status not in (408, 409, 425, 429) and status < 500:
                        raise UnusableReply(problem)
                    wait_s = _seconds(headers.get("Retry-After", "")) or wait_s
                if tries > self._settings.retries:
                    raise UnusableReply(f"{problem} (after {tries} tries)")
                self._counts["requests/retried"] += 1
                await asyncio.sleep(wait_s)

    async def _post(self, body: bytes) -> tuple[int, Any, bytes]:
        headers = {"Content-Type": "application/json"}
        if self._settings.api_key:
            headers["Authorization"] = f"Bearer {self._settings.api_key}"
        async with self._session.post(
            self._settings.endpoint, data=body, headers=headers, allow_redirects=False
        ) as response:
            said = bytearray()
            async for part in response.content.iter_chunked(1 << 16):
                said += part
                if len(said) > MAX_BODY_BYTES:
                    raise UnusableReply(f"{self._settings.endpoint} answered with more than {MAX_BODY_BYTES >> 20} MiB")
            return response.status, response.headers, bytes(said)

    def _content(self, said: bytes) -> str:
        try:
            answer = read_json(said)
            content = answer["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            raise UnusableReply(f"the endpoint's answer is no chat completion: {_shown(said)}") from None
        usage = answer.get("usage")
        for kind in ("prompt", "completion"):
            number = usage.get(f"{kind}_tokens") if isinstance(usage, dict) else None
            if isinstance(number, int):
                self._counts[f"tokens/{kind}"] += number
        self._counts["requests/answered"] += 1
        if not isinstance(content, str):
            raise UnusableReply(f"the judge said nothing: {_shown(said)}")
        return content


def read_scores(reply: str, size: int, settings: JudgeSettings) -> list[float]:
    """The scores of `size` completions in a judge's reply, 0 at `lowest` to 1 at `highest`. Raises UnusableReply."""
    found = _in_json(reply, settings.json_key) if settings.json_key else _by_pattern(reply, size, settings.pattern)
    values = found if isinstance(found, list) else [found]
    if len(values) != size:
        raise UnusableReply(f"{len(values)} scores for {size} completions in the reply: {_shown(reply)}")
    scores: list[float] = []
    for value in values:
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not settings.lowest <= number <= settings.highest:  # also NaN
            bounds = f"{settings.lowest:g} to {settings.highest:g}"
            raise UnusableReply(f"the score {value!r:.40} is not in {bounds}: {_shown(reply)}")
        scores.append((number - settings.lowest) / (settings.highest - settings.lowest))
    return scores


def _by_pattern(reply: str, size: int, pattern: str) -> list[Any]:
    found = [match.group(1) for match in re.finditer(pattern, reply)]
    if not found:
        raise UnusableReply(f"no score (kwargs.pattern) in the reply: {_shown(reply)}")
    return found[-1:] if size == 1 else found


def _in_json(reply: str, key: str) -> Any:
    """The value of the key in the JSON object that the reply is, or holds."""
    start, end = reply.find("{"), reply.rfind("}")
    try:
        return read_json(reply[start : end + 1])[key]
    except (ValueError, LookupError, TypeError):
        raise UnusableReply(f"no JSON object with {key!r} (kwargs.json_key) in the reply: {_shown(reply)}") from None


def data_uri(image: bytes) -> str:
    kind = next((kind for magic, kind in IMAGE_TYPES.items() if image.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def _shown(said: bytes | str) -> str:
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    return shorten(" ".join(text.split()), limit=160) or "(nothing)"


def _seconds(retry_after: str) -> float:
    """Seconds that a Retry-After header asks for; 0 where it has none, or a date."""
    return min(float(retry_after), LONGEST_DELAY_S) if re.fullmatch(r"\d+(\.\d+)?", retry_after) else 0.0


def _load(setup: dict[str, Any]) -> tuple[dict[str, Any], Serve]:
    settings = JudgeSettings(**setup["settings"])
    settings.template()
    return {}, lambda channel: asyncio.run(_serve(setup["name"], settings, channel))


async def _serve(name: str, settings: JudgeSettings, channel: Channel) -> None:
    connector = aiohttp.TCPConnector(limit=settings.concurrency)
    running: set[asyncio.Task[None]] = set()

    async def answer(request: dict[str, Any]) -> None:
        channel.send(await judge.answer(request))

    async with aiohttp.ClientSession(connector=connector, trust_env=True) as session:
        judge = Judge(name, settings, session)
        while (request := await asyncio.to_thread(next, iter(channel), None)) is not None:
            task = asyncio.create_task(answer(request))
            running.add(task)
            task.add_done_callback(running.discard)


if __name__ == "__main__":
    run_worker(_load)
