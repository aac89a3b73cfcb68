"""`make chaos`: kill learner and rollout servers at random until enough have died, then count every prompt.

    python -m tests.rigs.chaos [--kills 100] [--rows 160] [--servers 2 3] [--on-stale wait drop] [--seed 1] [--fleet]

Real processes, real sockets, the scripted engine with log-normal lengths; the first server of a round pulls its
weights over ZeroMQ, the others map them. With `--fleet` all pull, in a chain: the learner sends a version to one
server, which sends it on to the next. Some kills are aimed: the victim dies at a named place in its code
(between journal and acknowledgement, with half of a checkpoint or of a weight file written, between two chunks of a
transfer, while a server that was asked to end gives its tickets back); the others come at a random time. Each round is
one epoch; rounds follow until there are enough kills and, with 100 or more, until every place has seen a death. A round
passes if

- every prompt of the epoch was trained exactly once, by the journal and by what the learner says it trained on;
- every group that a server saw acknowledged was trained, or is one that the learner says it dropped as stale (never
  under `on_stale: wait`);
- the ledger adds up after every single death of the learner, and in every line of metrics.jsonl.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from asyncrl.config.schema import RunConfig
from asyncrl.config.service_sections import OnStale
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.writer import Journal
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.prefork import Service
from tests.rigs.scripted_path import install_scripted_engine
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT, make_digits, make_tiny_model
from tests.rigs.two_processes import start, with_ports, write_config

PROMPTS_PER_STEP = 4
ROUND_S = 300.0
"""Longest that one round may take."""
AIMED_S = 25.0
"""A victim that has not come to the place where it should die is killed after this time."""
MANY_KILLS = 100
"""Number of kills with which rounds go on until every place has seen a death."""
MOST_ROUNDS = 12
LEFT = 130
"""Exit status of a server that was asked to end."""
FETCHING, RELAYING, RETURNING = "weights.fetching", "weights.relaying", "ticket.returning"
"""A server passes the first if it pulls its weights, one of a fleet the second, and one that leaves the third."""
AIMS: dict[str, dict[str, int]] = {
    "learner": {
        "tickets.journaled": 2,
        "tickets.sent": 3,
        "group.verified": 6,
        "journal.data_file_written": 5,
        "group.journaled": 5,
        "group.acknowledged": 5,
        "step.consumed": 3,
        "step.trained": 3,
        "weights.publishing": 80,
        "weights.filling": 80,
        "checkpoint.writing": 1,
        "checkpoint.renamed": 1,
    },
    "rollout_server": {
        "ticket.started": 3,
        "group.sending": 6,
        "group.sent": 6,
        "weights.loading": 120,
        FETCHING: 4,
        RELAYING: 4,
        RETURNING: 2,
    },
}
"""Place -> at which pass of it a process dies, at most."""


@dataclass
class Victim:
    """A service that is started again whenever it dies."""

    module: str
    config: Path
    places: dict[str, int]
    """Places where it may be told to die, and at which pass, at most."""
    process: Service | None = None
    aim: str = ""
    dies_at: float = 0.0
    """Monotonic time of the kill, whatever it is doing then."""
    leaves_at: float = float("inf")
    """Monotonic time at which it is asked to end."""

    @property
    def log(self) -> Path:
        return self.config.parent / f"{self.module}.log"

    @property
    def code(self) -> int | None:
        return self.process.poll() if self.process else None

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


@dataclass
class Round:
    """Outcome of one epoch under fire."""

    servers: int
    on_stale: OnStale
    kills: Counter[str] = field(default_factory=Counter)
    """Kills by victim and place; `anywhere` is the clock's choice."""
    trained: int = 0
    acknowledged: int = 0
    dropped: int = 0
    relayed: int = 0
    """Versions that a server had from another one."""
    returned: int = 0
    """Times that a server gave a group back before its end."""
    checks: int = 0
    """How often the ledger was found to add up on disk."""
    seconds: float = 0.0


class Chaos:
    """One epoch. `deaths` counts those of all rounds, by module and place."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        rows: int,
        servers: int,
        seed: int,
        kills: int,
        deaths: Counter[str],
        fleet: bool,
    ):
        self.rng = random.Random(seed)
        self.rows = rows
        self.kills_left = kills
        self.run_dir = folder
        self._is_fleet = fleet
        self.result = Round(servers, config.learner.on_stale)
        self.config = with_ports(config.model_copy(update={"run_dir": str(folder)}))
        self.learner = Victim("learner", write_config(self.config, folder), AIMS["learner"])
        self.servers = [self._server(number) for number in range(servers)]
        self._deaths = deaths

    def _server(self, number: int) -> Victim:
        """The first one pulls its weights over ZeroMQ, the others map them; of a fleet all pull."""
        pulls = number == 0 or self._is_fleet
        sections: dict[str, Any] = {
            "telemetry": self.config.telemetry.model_copy(update={"rollout_port": 0}),
        }
        if not self._is_fleet:
            channel = "zmq" if pulls else "shm"
            sections["rollout"] = self.config.rollout.model_copy(update={"weights_channel": channel})
        never = set() if self._is_fleet else {RELAYING} if pulls else {RELAYING, FETCHING}
        places = {place: count for place, count in AIMS["rollout_server"].items() if place not in never}
        file = write_config(
            self.config.model_copy(update=sections), self.run_dir.with_name(f"{self.run_dir.name}-server-{number}")
        )
        return Victim("rollout_server", file, places)

    def run(self) -> Round:
        started = time.monotonic()
        victims = [self.learner, *self.servers]
        for victim in victims:
            self._start(victim)
        try:
            while self.learner.code != 0:
                for victim in victims:
                    self._look_after(victim)
                if time.monotonic() - started > ROUND_S:
                    raise AssertionError(f"the round did not end within {ROUND_S:g} s\n{self._logs()}")
                time.sleep(0.02)
        finally:
            for victim in victims:
                victim.kill()
        self.result.seconds = time.monotonic() - started
        self._check_account()
        self._check_epoch()
        return self.result

    def _start(self, victim: Victim) -> None:
        """Start a service, which is to die at a place (rather at one that has seen few deaths) or after a time."""
        resume = victim is self.learner and (self.run_dir / JOURNAL_FILE).exists()
        victim.aim, crash_at, life_s, victim.leaves_at = "", "", float("inf"), float("inf")
        if self.kills_left > 0:
            life_s = self.rng.uniform(0.2, 5.0)  # starting takes about a second: some die while they do
            if self.rng.random() < 0.75:
                weights = [1 / (1 + 20 * self._deaths[f"{victim.module} {place}"]) for place in victim.places]
                (victim.aim,) = self.rng.choices(list(victim.places), weights)
                crash_at, life_s = f"{victim.aim}:{self.rng.randint(1, victim.places[victim.aim])}", AIMED_S
                if victim.aim == RETURNING:
                    victim.leaves_at = time.monotonic() + self.rng.uniform(2.0, 5.0)
        victim.dies_at = time.monotonic() + life_s
        victim.process = start(victim.module, victim.config, *(["--resume"] if resume else []), crash_at=crash_at)

    def _look_after(self, victim: Victim) -> None:
        code = victim.code
        if code is None:
            if victim.process and time.monotonic() >= victim.leaves_at:
                victim.leaves_at = float("inf")
                victim.process.send_signal(signal.SIGTERM)
            if self.kills_left > 0 and time.monotonic() >= victim.dies_at:
                victim.aim = ""
                victim.kill()
            return
        if code == 0:
            return
        if code == LEFT and victim.aim == RETURNING:  # it had fewer tickets to give back
            self._start(victim)
            return
        if code != -9:
            raise AssertionError(f"{victim.config} ended with {code}\n{self._logs()}")
        self.kills_left -= 1
        place = f"{victim.module} {victim.aim or 'anywhere'}"
        self.result.kills[place] += 1
        self._deaths[place] += 1
        if victim is self.learner:
            self._check_account()
        self._start(victim)

    # --- the verdict --------------------------------------------------------------------------------

    def _check_account(self) -> None:
        """Opening a journal checks its pages, its payloads and that every ticket is in exactly one state."""
        if not (self.run_dir / JOURNAL_FILE).exists():
            return
        journal = Journal(self.run_dir / JOURNAL_FILE)
        state = journal.state()
        live = len(state.waiting) + len(state.buffered)
        counted = state.counters.get("trained", 0) + state.counters.get("dropped_stale", 0) + live
        assert state.counters.get("issued", 0) == counted, state
        journal.close()
        self.result.checks += 1
        self.result.dropped = state.counters.get("dropped_stale", 0)
        assert self.result.on_stale != "wait" or self.result.dropped == 0, state

    def _check_epoch(self) -> None:
        steps = self.rows // PROMPTS_PER_STEP
        with sqlite3.connect(self.run_dir / JOURNAL_FILE) as db:
            consumption = db.execute("SELECT position, ticket_id, step FROM consumption ORDER BY position").fetchall()
        assert [row[0] for row in consumption] == list(range(self.rows)), "every position once"
        assert Counter(row[2] for row in consumption) == dict.fromkeys(range(1, steps + 1), PROMPTS_PER_STEP)

        metrics = read_lines(self.run_dir / "metrics.jsonl")
        assert [line["step"] for line in metrics] == list(range(1, steps + 1))
        assert all(line["ledger_residual"] == 0 for line in metrics)
        assert all(line["staleness/max"] <= self.config.learner.max_staleness for line in metrics)

        samples = read_lines(self.run_dir / "samples.jsonl")
        rows = Counter(sample["row_id"] for sample in samples)
        assert len(rows) == self.rows, f"{len(rows)} of {self.rows} prompts were trained"
        assert set(rows.values()) == {1}, f"trained more than once: {rows.most_common(3)}"
        self.result.trained = len(rows)

        said = "\n".join(server.log.read_text(errors="replace") for server in self.servers)
        acknowledged = {int(number) for number in re.findall(r"ticket (\d+) is acknowledged", said)}
        dropped = re.findall(r"dropping tickets \[([\d, ]+)\]", self.learner.log.read_text(errors="replace"))
        said_dropped = {int(number) for line in dropped for number in line.split(",")}
        missing = acknowledged - {row[1] for row in consumption} - said_dropped
        assert not missing, f"acknowledged, never trained and never dropped: {sorted(missing)}"
        self.result.acknowledged = len(acknowledged)
        self.result.relayed = len(re.findall(r"from other servers: [1-9]", said))
        self.result.returned = len(re.findall(r"comes back from", self.learner.log.read_text(errors="replace")))
        if self._is_fleet:
            assert self.result.relayed, "no version came from another server"

    def _logs(self) -> str:
        return "\n".join(logs(victim.config.parent) for victim in (self.learner, *self.servers))


def chaos_config(model: Path, data: Path, *, seed: int, on_stale: OnStale, fleet: bool = False) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": "set by each round",
            "model": {"path": str(model), "freeze_vision_tower": False},
            "data": {"train_files": [str(data / "rl.parquet")], "max_prompt_length": 128, "max_response_length": 32},
            "batch": {"prompts_per_step": PROMPTS_PER_STEP, "group_size": 2, "tokens_per_microbatch": 1024},
            "learner": {"max_staleness": 2, "on_stale": on_stale, "cpu_threads": 1},
            "rollout": {
                "engine": "scripted",
                "cpu_threads": 1,
                "engine_args": {"mean_length": 8, "length_sigma": 0.8, "seconds_per_token": 0.02},
            }
            | ({"weights_channel": "relay", "relay": {"fan_out": 1}} if fleet else {}),
            "reward": {"functions": [{"function": f"{ROOT}/tests/rigs/short_reward.py:short"}], "workers": 1},
            "evaluation": {"before_training": False},
            "alignment": {"rows": 0},
            "trainer": {"seed": seed, "save_freq": 3, "samples_per_step": PROMPTS_PER_STEP},
            "network": {"control_port": 0, "weights_port": 0, "heartbeat_s": 0.2, "timeout_s": 3.0},
            "telemetry": {"learner_port": 0, "rollout_port": 0, "log_level": "DEBUG"},
        }
    )


def run_chaos(
    folder: Path,
    *,
    kills: int,
    rows: int,
    servers: Sequence[int],
    on_stale: Sequence[OnStale] = ("wait",),
    seed: int,
    per_round: int,
    fleet: bool = False,
    tell: Callable[[str], None],
) -> list[Round]:
    """Rounds with each number of servers in turn until `kills` processes have died."""
    # Large enough for its weights to travel in several chunks.
    model, data = make_tiny_model(folder / "model", intermediate=2048), make_digits(folder / "data", rl_rows=rows)
    rounds: list[Round] = []
    deaths: Counter[str] = Counter()
    while (done := deaths.total()) < kills or (kills >= MANY_KILLS and spared(deaths, fleet)):
        number = len(rounds)
        assert number < MOST_ROUNDS, (
            f"after {number} rounds and {done} kills nobody has died at {spared(deaths, fleet)}"
        )
        config = chaos_config(model, data, seed=seed + number, on_stale=on_stale[number % len(on_stale)], fleet=fleet)
        chaos = Chaos(
            folder / f"round-{number}",
            config,
            rows=rows,
            servers=servers[number % len(servers)],
            seed=seed + number,
            kills=min(per_round, kills - done) if done < kills else per_round,
            deaths=deaths,
            fleet=fleet,
        )
        result = chaos.run()
        rounds.append(result)
        tell(
            f"round {number}: {result.servers} servers, {result.on_stale}, {result.kills.total()} kills: "
            f"{result.trained} of {rows} prompts trained once, {result.acknowledged} acknowledged, "
            f"{result.dropped} dropped, {result.relayed} versions relayed, {result.returned} groups given back, "
            f"ledger sound {result.checks} times, {result.seconds:.0f} s"
        )
    return rounds


def check_ten_kills(folder: Path, *, fleet: bool = False) -> None:
    """Short version: one number of servers, two rounds at most."""
    lines: list[str] = []
    servers = [3 if fleet else 2]
    rounds = run_chaos(folder, kills=10, rows=60, servers=servers, seed=7, per_round=10, fleet=fleet, tell=lines.append)
    kills = sum((round.kills for round in rounds), Counter[str]())
    assert kills.total() >= 10, lines
    assert {name.split()[0] for name in kills} == {"learner", "rollout_server"}
    assert all(round.trained == 60 for round in rounds)
    # Groups that were journaled before a death and acknowledged by nobody are not counted.
    assert all(round.acknowledged >= 45 for round in rounds)
    assert all(round.checks >= 1 for round in rounds)


def spared(deaths: Counter[str], fleet: bool) -> list[str]:
    """Places where nobody has died."""
    never = () if fleet else (RELAYING,)
    places = (f"{module} {place}" for module, places in AIMS.items() for place in places if place not in never)
    return [place for place in places if not deaths[place]]


def main() -> None:
    install_scripted_engine()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--on-stale", nargs="+", choices=get_args(OnStale), default=["wait", "wait", "drop", "mask"])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--rows", type=int, default=160, help="prompts of an epoch")
    parser.add_argument("--per-round", type=int, default=25)
    parser.add_argument("--fleet", action="store_true", help="all servers pull, in a chain")
    parser.add_argument("--folder", type=Path, default=None, help="where logs and journals are kept")
    arguments = vars(parser.parse_args())
    folder = arguments.pop("folder") or Path(tempfile.mkdtemp(prefix="asyncrl-chaos-"))
    print(f"seed {arguments['seed']}, logs in {folder}", flush=True)
    rounds = run_chaos(folder, **arguments, tell=lambda line: print(line, flush=True))
    kills = sum((round.kills for round in rounds), Counter[str]())
    print("\n| killed | at | times |\n|---|---|---|")
    for name, count in sorted(kills.items()):
        module, place = name.split(" ")
        print(f"| {module} | {place} | {count} |")
    prompts, kept, dropped, checks = (
        sum(getattr(round, name) for round in rounds) for name in ("trained", "acknowledged", "dropped", "checks")
    )
    print(
        f"\n{kills.total()} kills in {len(rounds)} epochs: {prompts} prompts, each trained exactly once; {kept} groups "
        f"acknowledged, none lost ({dropped} dropped as stale, as configured, and sampled again); ledger sound "
        f"{checks} times"
    )


if __name__ == "__main__":
    main()
