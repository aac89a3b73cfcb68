"""Rewards and environments in an `asyncrl pool`: as on this machine, and what goes wrong on the way is counted."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.cli import main
from asyncrl.config.run_sections import NetworkConfig
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import RewardConfig
from asyncrl.environments.interface import Start
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.settings import override
from asyncrl.environments.worker_host import EnvironmentFailed
from asyncrl.errors import BadStateError, ExitCode, UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.reader import JournalReader
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.tools.health import find_problems
from protocol.codec import encode
from protocol.curve import make_keys, make_pool_keys
from protocol.errors import ErrorCode
from protocol.messages import (
    Error,
    FromPool,
    Goodbye,
    PoolHello,
    PoolWelcome,
    ProcessData,
    ProcessStart,
    ProcessStarted,
    Refusal,
    TrajectoryStatus,
    Wire,
)
from protocol.sockets import BadMessage, ServerSocket
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import mutate
from tests.rigs.pool_hosts import PoolProcess, pool_process
from tests.rigs.ports import own_port
from tests.rigs.small_runs import failure_of, logs
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import exit_codes, wait_until

FAULTS = f"{ROOT / 'tests' / 'rigs' / 'reward_faults.py'}"
LAMP = f"{ROOT / 'tests' / 'rigs' / 'lamp.py'}:Lamp"
ENVIRONMENT_FAULTS = f"{ROOT / 'tests' / 'rigs' / 'environment_faults.py'}:Faults"
Answer = TypeVar("Answer", bound=Wire)
NETWORK = NetworkConfig(heartbeat_s=0.2, timeout_s=5.0, start_timeout_s=20.0, reconnect_timeout_s=20.0)


def rewards(pool: str | list[str], functions: tuple[str, ...] = ("fault", "length"), **values: Any) -> RewardConfig:
    named = [{"function": name if ":" in name else f"{FAULTS}:{name}"} for name in functions]
    return RewardConfig.model_validate({"functions": named, "pool": pool, "workers": 1, "timeout_s": 2.0, **values})


def scoring(
    config: RewardConfig, scenario: Callable[[RewardPool], Awaitable[Any]], network: NetworkConfig = NETWORK
) -> Any:
    async def run() -> Any:
        pool = RewardPool(config, network)
        try:
            await pool.start()
            return await asyncio.wait_for(scenario(pool), 60)
        finally:
            await pool.close()

    return asyncio.run(run())


async def score(pool: RewardPool, completion: str) -> Score:
    return await pool.score(RewardSample(completion=completion, images=[b"\x89PNG" * 10_000], row_id="r"))


def test_scores_are_those_of_local_processes_and_failures_are_counted_alike(tmp_path: Path) -> None:
    """A reward that hangs is killed there, after as long as here."""
    texts = ["fine", "int", "raise", "nan", "kill9", "busy", "os_exit", "print", "fine"]

    async def all_scores(pool: RewardPool) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
        scores = [await score(pool, text) for text in texts]
        return [
            (s.status, s.error_kind, s.components, s.reward, s.error_message.partition(" (at the pool")[0])
            for s in scores
        ], dict(pool.errors)

    with pool_process(tmp_path) as host:
        here, there = scoring(rewards(""), all_scores), scoring(rewards(host.endpoint), all_scores)
        assert there == here
        assert there[1]["reward_timeout"] == 1
        assert there[1]["reward_crash"] == 2
        wait_until(lambda: not host.workers(), "the workers of a peer that said goodbye to end")
        assert "noise of a child" in host.log.read_text()


def test_the_endpoint_says_what_runs_and_what_has_ended(tmp_path: Path) -> None:
    port = own_port()
    url = f"http://127.0.0.1:{port}/metrics"

    def scraped() -> dict[str, float]:
        with urllib.request.urlopen(url, timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            " ".join([sample.name.removeprefix("asyncrl_pool_"), *sample.labels.values()]): sample.value
            for family in families
            for sample in family.samples
        }

    async def scenario(pool: RewardPool) -> None:
        await score(pool, "fine")
        found = await asyncio.to_thread(scraped)
        assert [found[name] for name in ("servers", "places", "processes reward running")] == [1, 3, 1]
        assert found["carried_bytes_total to"] > 40_000, "the image among them"
        assert find_problems(url) == []
        await score(pool, "kill9")
        await score(pool, "fine")

    with pool_process(tmp_path, "--metrics-port", str(port), "--processes", "3") as host:
        scoring(rewards(host.endpoint), scenario)
        wait_until(lambda: not host.workers(), "the workers of a peer that said goodbye to end")
        found = scraped()
        assert found["servers"] == found["processes reward running"] == 0
        assert found["started_total reward"] == 2
        assert (found["ended_total by itself reward"], found["ended_total stopped reward"]) == (1, 1)


def test_an_episode_with_images_is_that_of_a_local_process(tmp_path: Path) -> None:
    async def play(pool: str) -> list[Any]:
        environments = EnvironmentPool(override({"name": LAMP, "workers": 1, "pool": pool}, []), network=NETWORK)
        await environments.start()
        try:
            episode = await environments.begin(Start({"name": "row"}, seed=7))
            results = [await episode.step(environments.action(f"turn {turn}")) for turn in range(3)]
            await episode.close()
            return [environments.tools, episode.opening, episode.state_key, *results]
        finally:
            await environments.close()

    with pool_process(tmp_path) as host:
        here, there = asyncio.run(play("")), asyncio.run(play(host.endpoint))
    assert there == here
    assert isinstance(there[1].messages[0].parts[1], bytes), "a picture"


def test_an_environment_that_hangs_or_dies_there_fails_its_own_episode(tmp_path: Path) -> None:
    async def play(endpoint: str) -> None:
        values = {"name": ENVIRONMENT_FAULTS, "workers": 1, "pool": endpoint, "timeouts": {"step_s": 1.5}}
        pool = EnvironmentPool(override(values, []), network=NETWORK)
        await pool.start()
        try:
            for text, kind in [("die", "environment_died"), ("hang", "environment_timeout"), ("look", "")]:
                episode = await pool.begin(Start({"name": "row"}, seed=3))
                if kind:
                    with pytest.raises(EnvironmentFailed) as failed:
                        await episode.step(pool.action(text))
                    assert failed.value.kind == kind
                else:
                    assert (await episode.step(pool.action(text))).reward == 0.25
                await episode.close()
            assert pool.restarts == 2
        finally:
            await pool.close()

    with pool_process(tmp_path) as host:
        asyncio.run(play(host.endpoint))


def test_a_pool_that_is_killed_is_a_lost_worker_and_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    with pool_process(tmp_path) as host:

        async def scenario(pool: RewardPool) -> None:
            assert (await score(pool, "fine")).status == "ok"
            hanging = asyncio.create_task(score(pool, "sleep"))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(host.kill)
            lost = await hanging
            assert (lost.status, lost.error_kind, lost.reward) == ("error", "reward_crash", None)
            assert "the connection to the pool was lost" in lost.error_message
            waiting = asyncio.create_task(score(pool, "fine"))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await asyncio.to_thread(host.start)
            assert (await waiting).status == "ok"
            assert pool.errors == {"reward_crash": 1}

        scoring(rewards(host.endpoint, timeout_s=10.0), scenario)


def test_a_pool_that_stays_away_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    with pool_process(tmp_path) as host:

        async def scenario(pool: RewardPool) -> None:
            await asyncio.to_thread(host.kill)
            with pytest.raises(BadStateError, match=r"no pool answered .* within 1 s \(network.reconnect_timeout_s\)"):
                await asyncio.gather(*(score(pool, "fine") for _ in range(3)))

        scoring(rewards(host.endpoint), scenario, NETWORK.model_copy(update={"reconnect_timeout_s": 1.0}))


def test_several_pools_share_the_processes_and_one_takes_over_for_another(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with pool_process(tmp_path / "one") as one, pool_process(tmp_path / "other") as other:

        async def scenario(pool: RewardPool) -> None:
            assert len(one.workers()) == len(other.workers()) == 4, "two processes and their reapers"
            await asyncio.to_thread(one.kill)
            scores = await asyncio.gather(*(score(pool, "fine") for _ in range(40)))
            assert {s.error_kind for s in scores} <= {"", "reward_crash"}
            assert sum(s.status == "ok" for s in scores) >= 38
            assert (await score(pool, "fine")).status == "ok"

        scoring(rewards([one.endpoint, other.endpoint], workers=4), scenario)


def test_a_reward_that_cannot_be_loaded_there_names_its_file_and_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "needy.py"
    file.write_text("import not_on_that_machine\n\ndef reward(sample):\n    return 1.0\n")

    async def nothing(pool: RewardPool) -> None:
        raise AssertionError("it has started")

    with pool_process(tmp_path) as host, pytest.raises(UserError) as failed:
        scoring(rewards(host.endpoint, (f"{file}:reward",)), nothing)
    for told in (
        f"on the pool {host.endpoint} (",
        f"{file} cannot be imported",
        "what it imports must be on that machine",
    ):
        assert told in str(failed.value)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True], ids=["undisturbed", "killed in the middle"])
def test_a_run_whose_rewards_and_environment_are_in_a_pool(
    make_config: Callable[..., RunConfig], tmp_path: Path, is_killed: bool
) -> None:
    """Three processes and keys. What the pool had in work when it is killed is counted, and the run ends well."""
    keys, run = tmp_path / "keys", tmp_path / "run"
    make_keys(keys)
    make_pool_keys(keys)
    with pool_process(tmp_path, "--keys-dir", str(keys)) as host:
        config = make_config(
            environment={
                "name": LAMP.replace(":Lamp", ":SlowLamp"),
                "limits": {"turns": 4, "tokens_per_turn": 16, "images": 4},
                "workers": 1,
                "instances_per_worker": 4,
                "pool": host.endpoint,
            },
            reward={"pool": host.endpoint},
            data={"max_response_length": 120, "max_prompt_length": 390},
            rollout={"engine": "scripted", "engine_args": {"text": "answer 1"}},
            network={"keys_dir": str(keys)},
            trainer={"max_steps": 4},
        )
        file = write_config(with_ports(config), run)
        services = [start("learner", file), start("rollout_server", file)]
        if is_killed:
            metrics = run / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, "a step", run, 120)
            host.kill()
            host.start()
        assert exit_codes(services, 180) == [0, 0], logs(run)
        if not is_killed:
            assert "environment process" in host.log.read_text()
            assert "reward process" in host.log.read_text()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    if is_killed:
        assert "processes at the pool" in logs(run, whole=True), "it was noticed"
    with closing(JournalReader(run / JOURNAL_FILE)) as journal:
        groups = [journal.group(ticket_id) for ticket_id in journal.kept()]
    for record in (record for group in groups for record in group.trajectories):
        if record.reward is None:
            assert is_killed
            assert record.status is TrajectoryStatus.ERROR
            assert record.error_kind in ("reward_crash", "environment_died", "environment_neighbour_killed")
        else:
            assert record.reward == pytest.approx(0.75 + record.rewards["short"])


@pytest.mark.slow
def test_a_run_whose_pool_stays_away_stops_with_the_reason(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pool_process(tmp_path) as host:
        config = make_config(
            reward={"pool": host.endpoint}, network={"reconnect_timeout_s": 2.0}, trainer={"max_steps": 1000}
        )
        file = write_config(with_ports(config), run)
        services = [start("learner", file), start("rollout_server", file)]
        metrics = run / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and "\n" in metrics.read_text(), "a step", run, 120)
        host.kill()
        assert exit_codes(services, 60)[0] == ExitCode.BAD_STATE, logs(run)
    assert f"no pool answered at {host.endpoint} within 2 s" in failure_of(run).reason


# --- who may, and what the pool does with peers that are odd ---------------------------------------


async def answer(socket: ServerSocket, kind: type[Answer]) -> Answer:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        received = await socket.recv(0.2)
        assert not isinstance(received, BadMessage), received
        if isinstance(received, kind):
            return received
    raise AssertionError(f"no {kind}")


def hello(**values: Any) -> PoolHello:
    fields = {"server_id": "s-1", "session": "a", "heartbeat_s": 0.2, "timeout_s": 1.0}
    return PoolHello.model_validate(fields | values)


def talk(host: PoolProcess, scenario: Callable[[ServerSocket], Awaitable[None]]) -> None:
    async def run() -> None:
        socket = ServerSocket(host.endpoint, FromPool, peer="pool")
        try:
            await scenario(socket)
        finally:
            socket.close()

    asyncio.run(run())


def test_a_peer_that_is_silent_has_its_processes_killed(tmp_path: Path) -> None:
    async def scenario(socket: ServerSocket) -> None:
        await socket.send(hello(), 5)
        await answer(socket, PoolWelcome)
        await socket.send(ProcessStart(process=1, kind="reward"), 5)
        started = await answer(socket, ProcessStarted)
        assert psutil.pid_exists(started.pid)
        await asyncio.sleep(0.5)
        silent_from = time.monotonic()
        while psutil.pid_exists(started.pid):
            assert time.monotonic() - silent_from < 10
            await asyncio.sleep(0.05)
        await socket.send(ProcessData(process=1, data=memoryview(b"?")), 5)
        error = await answer(socket, Error)
        assert error.code is ErrorCode.NOT_WELCOME

    with pool_process(tmp_path) as host:
        talk(host, scenario)
        assert "it has been silent for" in host.log.read_text()


def test_a_second_session_ends_the_processes_of_the_first_and_places_are_bounded(tmp_path: Path) -> None:
    async def scenario(socket: ServerSocket) -> None:
        await socket.send(hello(timeout_s=30), 5)
        await answer(socket, PoolWelcome)
        await socket.send(ProcessStart(process=1, kind="reward"), 5)
        first = await answer(socket, ProcessStarted)
        await socket.send(ProcessStart(process=2, kind="environment"), 5)
        await socket.send(hello(session="b", timeout_s=30), 5)
        await answer(socket, PoolWelcome)
        await socket.send(ProcessStart(process=3, kind="reward"), 5)  # waits for the place of the first
        third = await answer(socket, ProcessStarted)
        assert third.process == 3
        assert not psutil.pid_exists(first.pid)
        await socket.send(Goodbye(reason="done"), 5)

    with pool_process(tmp_path, "--processes", "1") as host:
        talk(host, scenario)
        wait_until(lambda: not host.workers(), "all processes to end")


def test_nonsense_from_one_peer_costs_the_others_nothing(tmp_path: Path) -> None:
    """Messages of all types, mutated; a peer that sends too many is ignored."""
    rng = random.Random(0)

    def send_nonsense(host: PoolProcess) -> None:
        with zmq.Context() as context:
            for _ in range(6):
                with context.socket(zmq.DEALER) as sock:
                    sock.linger = 1000
                    sock.connect(host.endpoint)
                    sock.send_multipart(encode(hello(server_id=f"odd-{rng.random()}")))
                    for _ in range(40):
                        sock.send_multipart(mutate(rng, rng.choice(content.EXAMPLES)))

    with pool_process(tmp_path) as host:

        async def scenario(pool: RewardPool) -> None:
            await asyncio.to_thread(send_nonsense, host)
            scores = await asyncio.gather(*(score(pool, "fine") for _ in range(20)))
            assert {s.status for s in scores} == {"ok"}

        scoring(rewards(host.endpoint), scenario)
        assert "a message could not be used" in host.log.read_text()
        assert "Traceback" not in host.log.read_text()


def test_another_protocol_is_refused_with_the_fix(tmp_path: Path) -> None:
    async def scenario(socket: ServerSocket) -> None:
        await socket.send(hello(protocol_major=1), 5)
        refusal = await answer(socket, Refusal)
        assert refusal.code is ErrorCode.PROTOCOL_VERSION
        assert "the pool speaks" in refusal.reason
        assert "Upgrade the server" in refusal.fix
        await socket.send(ProcessStart(process=1, kind="reward"), 5)
        await answer(socket, Error)

    with pool_process(tmp_path) as host:
        talk(host, scenario)
        assert not host.workers()


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ("unknown", "the pool at .* does not know this server's key"),
        ("another pool's", r"pool\.public is not the key of the pool there"),
        ("none", "the pool there uses keys"),
    ],
)
def test_a_wrong_key_is_refused_with_the_reason(tmp_path: Path, theirs: str, message: str) -> None:
    keys, other = tmp_path / "keys", tmp_path / "other"
    for folder in (keys, other):
        make_keys(folder)
        make_pool_keys(folder)
    if theirs == "unknown":
        (other / "pool.public").write_bytes((keys / "pool.public").read_bytes())
    with pool_process(tmp_path, "--keys-dir", str(keys)) as host:

        async def fine(pool: RewardPool) -> None:
            assert (await score(pool, "fine")).reward == 5.0

        stranger = NETWORK.model_copy(update={"keys_dir": "" if theirs == "none" else str(other)})
        with pytest.raises(UserError, match=message):
            scoring(rewards(host.endpoint), fine, stranger)
        assert not host.workers()
        scoring(rewards(host.endpoint), fine, NETWORK.model_copy(update={"keys_dir": str(keys)}))


def test_a_taken_port_of_its_metrics_is_said_before_it_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["pool", "--port", "0", "--metrics-port", port]) == ExitCode.USER_ERROR
    assert "Set --metrics-port to a free port" in capsys.readouterr().err
    assert main(["pool", "--port", "0", "--metrics-port", "70000"]) == ExitCode.USER_ERROR
    assert "--metrics-port is 70000" in capsys.readouterr().err


def test_it_listens_beyond_loopback_only_with_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "whoever reaches it can run code here" in capsys.readouterr().err
