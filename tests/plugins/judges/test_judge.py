"""A judge behind a loopback endpoint: whatever it answers, a completion has a score or a status."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.sections import RewardConfig
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.rewards.spec import check_rewards
from asyncrl_plugins.judges.judge import UnusableReply, data_uri, read_scores
from asyncrl_plugins.judges.judge_settings import JudgeSettings
from tests.rigs.reward_pools import run_pool

KEY = "sk-secret-of-the-test"


class Endpoint:
    """A chat completion endpoint: the word `say:X` in a prompt decides the answer."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.most_at_once = self.at_once = 0
        self.over = threading.Event()
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint._lock:
                    endpoint.requests.append(body)
                    endpoint.headers.append(self.headers.get("Authorization", ""))
                    endpoint.at_once += 1
                    endpoint.most_at_once = max(endpoint.most_at_once, endpoint.at_once)
                    times = sum(request == body for request in endpoint.requests)
                try:
                    status, headers, answer = endpoint.answer(body, times)
                finally:
                    with endpoint._lock:
                        endpoint.at_once -= 1
                with suppress(BrokenPipeError):  # who asked does not wait any more
                    self.send_response(status)
                    for name, value in {**headers, "Content-Length": str(len(answer))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, body: dict[str, Any], times: int) -> tuple[int, dict[str, str], bytes]:
        content = body["messages"][0]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        said = text.rpartition("say:")[2].split()[0]
        if said == "busy" and times < 3:
            return (429 if times == 1 else 503), {"Retry-After": "0.05"}, b"slow down"
        if said == "refuse":
            return 401, {}, b"who are you?"
        if said == "broken":
            return 500, {"Retry-After": "0.01"}, b"a fault"
        if said == "slow":
            time.sleep(0.2)
        if said == "hang":
            self.over.wait(30)
        if said == "garbage":
            return 200, {}, b"<html>not what you think</html>"
        reply = {"busy": "Score: 5", "slow": "Score: 5", "chat": "I like it."}.get(said, said.replace("_", " "))
        answer = {"choices": [{"message": {"content": reply}}], "usage": {"prompt_tokens": 10, "completion_tokens": 2}}
        return 200, {}, json.dumps(answer).encode()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.over.set()
    made.server.shutdown()
    made.server.server_close()


def judged(
    endpoint: Endpoint, scenario: Callable[[RewardScorer], Any], *functions: dict[str, Any], **kwargs: Any
) -> Any:
    judge = {"function": "llm_judge", "kwargs": {"url": endpoint.url, "model": "j", "timeout_s": 20.0, **kwargs}}
    return run_pool(RewardConfig.model_validate({"functions": [*functions, judge], "workers": 1}), scenario)


def sample(says: str, **fields: Any) -> RewardSample:
    return RewardSample(f"say:{says} ", prompt="q", row_id="rows:1", **fields)


def test_a_judge_gives_scores_and_statuses_never_a_zero(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    words = ["Score:_7", "busy", "refuse", "broken", "hang", "garbage", "chat", "Score:_11"]

    async def scenario(pool: RewardScorer) -> tuple[dict[str, Score], dict[tuple[str, str], float]]:
        scores = await asyncio.gather(*(pool.score(sample(word)) for word in [*words, "Score:_7"]))
        assert (await pool.score(sample("busy"))).reward == 0.5, "it was answered before"
        return dict(zip(words, scores, strict=False)), pool.counts

    scores, counts = judged(
        endpoint, scenario, {"function": "format_think"}, retries=2, api_key_env="THE_KEY", timeout_s=3.0
    )
    assert {word: score.reward for word, score in scores.items() if score.status == "ok"} == {
        "Score:_7": 0.7,
        "busy": 0.5,
    }
    assert scores["busy"].components == {"format_think": 0.0, "llm_judge": 0.5}
    messages = {word: (score.error_kind, score.error_message) for word, score in scores.items() if score.error_kind}
    expected = {
        "refuse": ("reward_judge", "answered 401: who are you?"),
        "broken": ("reward_judge", "answered 500: a fault (after 3 tries)"),
        "hang": ("reward_timeout", "was not done after 3 s"),
        "garbage": ("reward_judge", "is no chat completion: <html>not what you think</html>"),
        "chat": ("reward_judge", "no score (kwargs.pattern) in the reply: I like it."),
        "Score:_11": ("reward_judge", "the score '11' is not in 0 to 10: Score: 11"),
    }
    assert {word: kind for word, (kind, _) in messages.items()} == {word: kind for word, (kind, _) in expected.items()}
    assert all(text in messages[word][1] for word, (_, text) in expected.items()), messages
    assert KEY not in str(scores), "a key is in no message"
    assert set(endpoint.headers) == {f"Bearer {KEY}"}
    tries = {"Score:_7": 1, "busy": 3, "refuse": 1, "broken": 3, "hang": 1, "garbage": 1, "chat": 1, "Score:_11": 1}
    assert len(endpoint.requests) == sum(tries.values())
    assert counts == {
        ("llm_judge", "requests/answered"): 4,
        ("llm_judge", "requests/cached"): 2,
        ("llm_judge", "requests/retried"): 4,
        ("llm_judge", "requests/failed"): 6,
        ("llm_judge", "tokens/prompt"): 40,
        ("llm_judge", "tokens/completion"): 8,
    }


def test_requests_go_side_by_side_up_to_the_limit(endpoint: Endpoint) -> None:
    async def scenario(pool: RewardScorer) -> list[Score]:
        return await asyncio.gather(*(pool.score(sample("slow", answer=str(i))) for i in range(8)))

    scores = judged(endpoint, scenario, concurrency=4)
    assert [score.reward for score in scores] == [0.5] * 8
    assert endpoint.most_at_once == 4


def test_a_judge_of_a_group_sees_all_completions_and_images(endpoint: Endpoint, tmp_path: Path) -> None:
    template = tmp_path / "judge.jinja"
    template.write_text("{{ prompt }} {% for text in completions %}[{{ text }}]{% endfor %} say:{{ columns.say }}")

    async def scenario(pool: RewardScorer) -> list[Score]:
        group, image = pool.group(2), b"\x89PNG..."
        columns = {"say": '{"scores":[4,2]}'}
        samples = [RewardSample(text, prompt="q", images=[image], columns=columns) for text in ("a", "b")]
        return await asyncio.gather(*(group.score(i, each) for i, each in enumerate(samples)))

    settings = {"prompt": str(template), "images": True, "json_key": "scores", "lowest": 1, "highest": 5}
    judge = {"function": "llm_judge", "group": True, "kwargs": {"url": endpoint.url, "model": "j", **settings}}
    scores = run_pool(RewardConfig.model_validate({"functions": [judge]}), scenario)
    assert [score.reward for score in scores] == [0.75, 0.25]
    (request,) = endpoint.requests
    image, text = request["messages"][0]["content"]
    assert image == {"type": "image_url", "image_url": {"url": data_uri(b"\x89PNG...")}}
    assert text["text"].startswith("q [a][b]")
    assert (request["model"], request["temperature"]) == ("j", 0.0)


def test_a_lost_judge_is_a_status_and_is_started_again(endpoint: Endpoint) -> None:
    async def scenario(pool: RewardScorer) -> list[Score]:
        asked = asyncio.create_task(pool.score(sample("hang")))
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # the worker goes with its reaper
                if "asyncrl_plugins.judges.judge" in process.cmdline():
                    process.kill()
        return [await asked, await pool.score(sample("Score:_2"))]

    lost, after = judged(endpoint, scenario)
    assert (lost.status, lost.error_kind) == ("error", "reward_crash")
    assert "'llm_judge' lost its worker: it was killed by SIGKILL" in lost.error_message
    assert after.reward == 0.2


def settings_of(**changes: Any) -> JudgeSettings:
    return JudgeSettings.model_validate({"url": "http://127.0.0.1:1/v1", "model": "j", **changes})


def test_scores_are_read_from_replies() -> None:
    assert read_scores("Thought: score 3?\nScore: 8.", 1, settings_of()) == [0.8], "the last one counts"
    assert read_scores("Score: 1\nScore: 2", 2, settings_of()) == [0.1, 0.2]
    assert read_scores('```json\n{"s": 5, "why": "x"}\n```', 1, settings_of(json_key="s")) == [0.5]
    for reply, size, changes in [
        ("Score: 1", 2, {}),
        ("{}", 1, {"json_key": "s"}),
        ('{"s": true}', 1, {"json_key": "s"}),
        ('{"s": "good"}', 1, {"json_key": "s"}),
        ('{"s": NaN}', 1, {"json_key": "s"}),
        ('{"s": 1%s}' % ("0" * 400), 1, {"json_key": "s"}),
        (f'{{"s": {"[" * 100}1{"]" * 100}}}', 1, {"json_key": "s"}),
        ('{"s": %s}' % ("[" * 100_000), 1, {"json_key": "s"}),
        ("Score: -1", 1, {}),
        ("Score (0-10): 7", 1, {}),
        ("", 1, {}),
    ]:
        with pytest.raises(UnusableReply):
            read_scores(reply, size, settings_of(**changes))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model": "j"}, "kwargs.url is missing"),
        ({"url": "127.0.0.1:80", "model": "j"}, "kwargs.url is '127.0.0.1:80'. Give one like"),
        ({"modle": "j"}, "unknown key kwargs.modle. Did you mean 'model'"),
        ({"api_key": "x"}, "unknown key kwargs.api_key. Did you mean 'api_key_env'"),
        ({"api_key_env": "NO_SUCH_KEY"}, "there is no such environment variable here"),
        ({"timeout_s": 0}, "kwargs.timeout_s is 0: Input should be greater than 0"),
        ({"pattern": "Score"}, "kwargs.pattern has no group"),
        ({"pattern": "("}, "no regular expression"),
        ({"prompt": "/no/such.jinja"}, "cannot be read"),
        ({"lowest": 10}, r"kwargs.lowest \(10\) must be below"),
    ],
)
def test_wrong_settings_are_refused(kwargs: dict[str, Any], message: str) -> None:
    base = {} if "url" in kwargs or "model" in kwargs else {"url": "http://127.0.0.1:1/v1", "model": "j"}
    entry = {"function": "llm_judge", "kwargs": {**base, **kwargs}}
    with pytest.raises(UserError, match=message):
        check_rewards(RewardConfig.model_validate({"functions": [entry]}))
