"""Evaluation beside training: bounded, on one version that servers keep, and never in the way of training tickets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.score import accuracies_by_label, labels_by, scores_by_label
from learner.groups.group_verification import _version_problems
from learner.groups.ticket import PreparedTicket
from learner.loop.step_schedule import StepSchedule
from learner.network.servers import ModelFacts, Servers, ServerState
from learner.network.ticket_sender import EvaluationSender, TicketSender
from learner.tickets.assignments import MAX_ATTEMPTS
from learner.tickets.evaluation import Evaluation
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_deadline import TicketDeadline
from learner.tickets.ticket_writer import TicketWriter
from protocol.codec import Limits
from protocol.messages import TicketKind, Tickets, WeightManifest
from protocol.weights import Publication, Tensor
from tests.rigs.fuzz import content
from tests.rigs.journal_groups import throwaway_journal
from tests.rigs.unconnected import Ports
from tests.unit.learner.test_tickets import prepared, received

MakeConfig = Callable[..., RunConfig]
EVALUATION_IDS = 2**40
BOUND, PER_STEP, ROOM = 2, 2, 4


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, publication="p", tensors=(), total_bytes=0)


class Rig:
    """The network thread's parts without sockets. `turn` is one iteration of its loop."""

    def __init__(self, config: RunConfig, publication: Publication):
        self.ports = Ports()
        self.ledger = TicketLedger(throwaway_journal(), prompts_per_step=PER_STEP, bound=BOUND, total_groups=100)
        facts = ModelFacts("m", "p", 100)
        self.servers = Servers(
            config.network,
            config.trainer.mode,
            config.rollout.quantization,
            "run",
            cast(Any, self.ports),
            self.ledger,
            facts,
        )
        self.tickets = TicketSender(self.servers, self.ledger, prepared, Limits())
        self.evaluations = EvaluationSender(self.servers, self.ledger, self.tickets, publication)
        self.written: list[int] = []

    def join(self, name: str) -> None:
        """Connect a server, as after its parity check."""
        hello: Any = SimpleNamespace(server_id=name, session=name, max_groups=ROOM)
        self.servers.connected[name] = ServerState(hello, name.encode(), aligned=True)
        if self.servers.manifest is not None:
            self.servers._tell(name, self.servers.manifest)

    def write(self, index: int, version: int) -> PreparedTicket:
        self.written.append(index)
        return prepared(TicketSlot(EVALUATION_IDS + version * 100 + index, index, version, 0), TicketKind.EVAL)

    def begin(self, version: int, rows: int) -> Evaluation:
        self.ledger.evaluation = Evaluation(version, version, rows, self.write, self.ledger.changed)
        self.evaluations.begin(self.ledger.evaluation)
        return self.ledger.evaluation

    def turn(self) -> None:
        for _ in range(3):
            self.tickets.work()
            self.evaluations.work()

    def publish(self, version: int) -> None:
        self.servers.announce(manifest(version))
        self.tickets.admit(version)
        self.turn()

    def sent(self, name: str) -> list[int | str]:
        """Ids of the tickets that went to a server, and `v<version>` where it was told to load one; then forgotten."""
        mine = [message for identity, message in self.ports.sent if identity == name.encode()]
        self.ports.sent = [item for item in self.ports.sent if item[0] != name.encode()]
        found: list[int | str] = []
        for message in mine:
            if isinstance(message, Tickets):
                found += [ticket.ticket_id for ticket in message.tickets]
            elif isinstance(message, WeightManifest):
                found.append(f"v{message.version}")
        return found

    def arrive(self, *ticket_ids: int) -> None:
        for ticket_id in ticket_ids:
            item = self.ledger.out.get(ticket_id)
            assert item is not None, f"{ticket_id} is not out"
            holder = next(iter(self.ledger.out._entries[ticket_id].holders), "s")
            self.ledger.receive([received(item, server_id=holder)])

    def step(self) -> int:
        """A learner step, without its publication."""
        self.ledger.take()
        self.ledger.advance(self.ledger.version + 1)
        return self.ledger.version


@pytest.fixture
def rig(make_config: MakeConfig, tmp_path: Path) -> Iterator[Rig]:
    with Publication("run", tmp_path) as publication:
        made = Rig(make_config(), publication)
        yield made
        made.ledger.journal.close()


def rows(*indices: int, version: int = 0) -> list[int | str]:
    return [EVALUATION_IDS + version * 100 + index for index in indices]


def test_servers_keep_the_version_of_an_evaluation_while_training_goes_on_as_far_as_the_bound(rig: Rig) -> None:
    rig.join("a")
    rig.publish(0)
    assert rig.sent("a") == ["v0", 0, 1, 2, 3]
    running = rig.begin(0, rows=6)
    rig.turn()
    assert rig.written == [0, 1, 2, 3], "a row is prepared when there is room for it: never all of them"
    assert rig.sent("a") == rows(0, 1, 2, 3), "beside the training tickets, whose room it does not take"
    for version in (1, 2, 3):
        rig.arrive(2 * version - 2, 2 * version - 1)
        assert rig.ledger.ready(), "all that was issued before comes while the evaluation runs"
        assert rig.step() == version
        rig.publish(version)
        assert [i for i in rig.sent("a") if isinstance(i, str)] == [], "the server keeps version 0"
    assert rig.ledger.out.await_version(0), "the next training tickets want version 1 or newer"
    rig.arrive(*cast(list[int], rows(1, 3)))
    rig.turn()
    assert rig.sent("a") == rows(4, 5)
    assert not running.is_complete
    rig.arrive(*cast(list[int], rows(0, 2, 4, 5)))
    assert running.is_complete
    assert len(running.records()) == 6
    rig.turn()
    assert rig.sent("a") == ["v3", 6, 7, 8, 9]
    assert rig.ledger.counts().residual == 0


def test_a_lost_server_s_rows_go_to_one_that_has_the_version_or_loads_it_again(rig: Rig) -> None:
    rig.join("a")
    rig.join("b")
    rig.publish(0)
    rig.begin(0, rows=3)
    rig.turn()
    has = set(rig.sent("b"))
    rig.publish(1)
    rig.join("c")
    rig.turn()
    assert rig.sent("c")[0] == "v1", "who joins has the newest, and trains"
    rig.servers.lose("a", "killed")
    rig.turn()
    others = set(rows(0, 1, 2)) - has
    assert others
    assert others <= set(rig.sent("b")), "b has version 0, and the other rows already"
    rig.servers.lose("b", "killed")
    rig.turn()
    to_c = rig.sent("c")
    assert to_c.index("v0") < min(to_c.index(row) for row in rows(0, 1, 2))
    rig.arrive(*cast(list[int], rows(0, 1, 2)))
    rig.turn()
    assert "v1" in rig.sent("c")


def test_rows_of_the_only_keeper_which_has_stalled_go_to_one_that_loads_the_version_again(rig: Rig) -> None:
    rig.join("a")
    rig.publish(0)
    running = rig.begin(0, rows=1)
    rig.turn()
    rig.publish(1)
    rig.join("b")
    rig.turn()
    to_b = rig.sent("b")
    assert to_b[0] == "v1"
    assert not {"v0", *rows(0)} & set(to_b), "a may still answer"
    for entry in rig.ledger.out._entries.values():
        if "a" in entry.holders:
            entry.holders["a"] -= 2 * TicketDeadline().seconds(TicketKind.EVAL)
    rig.turn()
    to_b = rig.sent("b")
    assert to_b.count("v0") == 1
    assert to_b.index("v0") < to_b.index(EVALUATION_IDS)
    row = rig.ledger.out.get(EVALUATION_IDS)
    assert row is not None
    rig.ledger.receive([received(row, server_id="b")])
    assert running.is_complete
    rig.turn()
    assert "v1" in rig.sent("b")


def test_a_row_that_another_version_sampled_is_refused() -> None:
    """Its accuracy would be that of no policy."""
    item = prepared(TicketSlot(EVALUATION_IDS, 0, 3, 0), TicketKind.EVAL)
    group = received(item, 3, 4).group
    assert list(_version_problems(group, item.ticket, 5)) == ["token versions 3 to 4, but the ticket allows 3 to 3"]
    assert not list(_version_problems(group, item.ticket.model_copy(update={"kind": TicketKind.TRAIN}), 5))


def test_a_row_that_failed_is_tried_again_by_the_only_server_that_keeps_the_version(rig: Rig) -> None:
    """One that has joined with a newer version has not failed at it, and cannot try."""
    rig.join("a")
    rig.publish(0)
    rig.begin(0, rows=1)
    rig.turn()
    rig.publish(1)
    rig.join("b")
    rig.sent("a")
    rig.servers.give_back(EVALUATION_IDS, "a", "out of memory")
    rig.turn()
    assert rig.sent("a") == rows(0)


@pytest.mark.parametrize("others", [0, 1])
def test_an_evaluation_goes_on_without_a_row_whose_ticket_always_fails(
    rig: Rig, caplog: pytest.LogCaptureFixture, others: int
) -> None:
    """The run does not end, nor wait until its deadline, for a score; `others` are servers with a newer version."""
    rig.join("a")
    rig.publish(0)
    running = rig.begin(0, rows=3)
    rig.turn()
    rig.publish(1)
    for _ in range(others):
        rig.join("b")
    for _ in range(MAX_ATTEMPTS):
        assert not caplog.text
        rig.servers.give_back(EVALUATION_IDS + 1, "a", "the image is odd")
        rig.turn()
    assert "the evaluation of step 0 goes on without a score: ticket" in caplog.text
    assert f"(row {content.ticket(1, 0).prompt.row_id}) failed 3 times: the image is odd" in caplog.text
    rig.arrive(*cast(list[int], rows(0, 2)))
    rig.turn()
    assert running.is_complete
    assert [len(records) for records in running.records()] == [1, 0, 1]
    assert rig.sent("a")[-1] == "v1", "and the servers go on to newer weights"


def test_one_evaluation_after_another(rig: Rig) -> None:
    """The second begins before the network thread has seen that the first is complete."""
    rig.join("a")
    rig.publish(0)
    first = rig.begin(0, rows=2)
    rig.turn()
    rig.servers.announce(manifest(1))
    rig.arrive(*cast(list[int], rows(0, 1)))
    assert first.is_complete
    rig.sent("a")
    rig.begin(1, rows=2)
    rig.turn()
    assert rig.sent("a") == ["v1", *rows(0, 1, version=1)]


class Network:
    """A network thread whose groups come when the learner waits."""

    def __init__(self, rig: Rig, publication: Publication):
        self.rig, self.publication = rig, publication
        self.tickets, self.evaluations, self.servers = rig.tickets, rig.evaluations, rig.servers
        self.parity: Any = SimpleNamespace(holds_step=None, has_complete=False)
        self.timeline: Any = SimpleNamespace(doing=lambda *_: SimpleContext())
        self.waits = self.deadlines = 0

    def call_soon(self, method: Callable[..., None], *args: Any) -> None:
        method(*args)
        self.rig.turn()

    def wait_until(self, satisfied: Callable[[], bool], **_: Any) -> None:
        self.deadlines += 1
        while not satisfied():
            self.waits += 1
            out = sorted(i for i, entry in self.rig.ledger.out._entries.items() if entry.holders)
            assert out, "nothing can come"
            self.rig.arrive(out[0])  # training tickets come first: their ids are smaller
            self.rig.turn()


class SimpleContext:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Recorded:
    """A reporter."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[int, int, int]] = []

    @property
    def evaluated_steps(self) -> set[int]:
        return {step for step, *_ in self.evaluations}

    def evaluated(self, evaluation: Evaluation, waited_s: float) -> dict[str, Any]:
        self.evaluations.append((evaluation.step, evaluation.version, len(evaluation.records())))
        return {
            "accuracy": 0.5,
            "rows": evaluation.rows,
            "errors": 0,
            "seconds": evaluation.seconds,
            "waited_s": waited_s,
        }


@pytest.fixture
def make_schedule(rig: Rig, tmp_path: Path) -> Callable[[RunConfig, int], StepSchedule]:
    def make(config: RunConfig, num_rows: int) -> StepSchedule:
        writer = SimpleNamespace(num_held_out_rows=num_rows, write_evaluation=rig.write)
        device = SimpleNamespace(lend=lambda: None, take_back=lambda _: None, is_shared=False)
        progress = SimpleNamespace(step=0, version=0, is_last=False)
        network = Network(rig, rig.evaluations.publication)
        parts: Any = (progress, network, rig.ledger, device, None, writer, Recorded(), lambda *_: None)
        return StepSchedule(config.schedule_settings, *parts)

    return make


def steps(schedule: StepSchedule, rig: Rig, number: int) -> None:
    """Learner steps, as learner/training_loop.py makes them."""
    progress: Any = schedule.progress
    for _ in range(number):
        schedule.wait_for_batch()
        progress.step = progress.version = rig.step()
        rig.servers.announce(manifest(progress.version))
        schedule.admit_unless_evaluating()
        schedule.open_for_work()


def test_in_sync_mode_the_first_wait_has_room_for_the_start_of_the_engine(
    rig: Rig, make_config: MakeConfig, make_schedule: Callable[..., StepSchedule]
) -> None:
    """A server starts its engine in its first turn, after its welcome."""
    limits = {"learner": {"wait_timeout_s": 60.0}, "network": {"start_timeout_s": 500.0}}
    schedule = make_schedule(make_config(trainer={"mode": "sync"}, **limits), 1)
    assert sum(schedule._patience_s.values()) == 560
    rig.join("a")
    assert schedule._patience_s == {"learner.wait_timeout_s": 60.0}
    assert sum(make_schedule(make_config(**limits), 1)._patience_s.values()) == 60


def test_each_group_of_a_step_has_the_whole_deadline(
    rig: Rig, make_config: MakeConfig, make_schedule: Callable[..., StepSchedule]
) -> None:
    """Filters may drop many groups before a step has enough: as long as some arrive, nothing is lost."""
    schedule = make_schedule(make_config(learner={"max_staleness": BOUND}), 1)
    network = cast(Network, schedule.network)
    rig.join("a")
    rig.servers.announce(manifest(0))
    schedule.open_for_work()
    schedule.wait_for_batch()
    assert network.deadlines == network.waits == PER_STEP


def test_off_policy_the_learner_trains_beside_an_evaluation_and_records_it_once(
    rig: Rig, make_config: MakeConfig, make_schedule: Callable[..., StepSchedule]
) -> None:
    config = make_config(learner={"max_staleness": BOUND}, evaluation={"before_training": True, "every_steps": 5})
    schedule = make_schedule(config, 50)
    reporter, network = cast(Recorded, schedule.reporter), cast(Network, schedule.network)
    rig.join("a")
    rig.servers.announce(manifest(0))
    schedule.open_for_work()
    assert network.waits == 0, "training goes on"
    steps(schedule, rig, BOUND + 1)
    assert reporter.evaluations == []
    assert rig.ledger.evaluation is not None
    assert rig.ledger.evaluation.arrived == 0, "steps within the bound waited for none of its rows"
    schedule.wait_for_batch()
    assert reporter.evaluations == [(0, 0, 50)], "the next step needs newer weights on the servers"
    assert schedule.waits.totals()["evaluation"] > 0
    steps(schedule, rig, 3)
    assert rig.ledger.evaluation is not None, "that of step 5"
    schedule.finish_evaluation(before_step=5)
    assert rig.ledger.evaluation is not None, "a checkpoint of its own step does not wait for it"
    schedule.finish_evaluation(before_step=6)
    assert reporter.evaluations == [(0, 0, 50), (5, 5, 50)]
    assert not schedule.is_evaluation_due


def test_on_policy_and_after_the_last_step_the_learner_waits_for_the_evaluation(
    rig: Rig, make_config: MakeConfig, make_schedule: Callable[..., StepSchedule]
) -> None:
    for staleness, is_last in ((0, False), (BOUND, True)):
        config = make_config(learner={"max_staleness": staleness}, evaluation={"every_steps": 1})
        schedule = make_schedule(config, 6)
        cast(Any, schedule.progress).is_last = is_last
        cast(Any, schedule.progress).step = 1
        rig.servers.connected.clear()
        rig.join("a")
        rig.servers.announce(manifest(0))
        schedule.open_for_work()
        assert cast(Recorded, schedule.reporter).evaluations == [(1, 0, 6)]


def test_the_evaluated_version_can_be_fetched_until_the_last_row_is_here(rig: Rig, tmp_path: Path) -> None:
    publication = rig.evaluations.publication

    def publish(version: int) -> None:
        publication.publish(version, [Tensor("w", "float32", (1,), [memoryview(bytes(4))])])

    rig.join("a")
    publish(0)
    rig.publish(0)
    publication.hold(0)
    rig.begin(0, rows=1)
    rig.turn()
    for version in (1, 2, 3):
        publish(version)
    assert publication.versions == (0, 2, 3)
    rig.arrive(*cast(list[int], rows(0)))
    rig.turn()
    publish(4)
    assert publication.versions == (3, 4)


@pytest.mark.parametrize(
    ("buffered", "late", "evaluation", "said"),
    [
        (3, [], None, "groups of step 6 (needs 8, has 3)"),
        (8, [4, 5], None, "2 groups that are due before step 6, which has the 8 that it needs"),
        (3, [], (2, 9), "groups of step 6 (needs 8, has 3); the evaluation of step 4 goes on (2 of 9 rows)"),
        (8, [], (2, 9), "groups of step 6 (needs 8, has 8); the evaluation of step 4 goes on (2 of 9 rows)"),
        (3, [], (9, 9), "groups of step 6 (needs 8, has 3)"),
    ],
)
def test_a_wait_says_what_holds_the_step_up(
    buffered: int, late: list[int], evaluation: tuple[int, int] | None, said: str
) -> None:
    """Groups that came are not what is awaited, and an evaluation keeps the servers busy."""
    running = None
    if evaluation:
        arrived, rows = evaluation
        running = SimpleNamespace(step=4, arrived=arrived, rows=rows, is_complete=arrived == rows)
    counts = SimpleNamespace(buffered=buffered, dropped={})
    ledger = SimpleNamespace(counts=lambda: counts, late=lambda: late, evaluation=running, blockers=list)
    network = SimpleNamespace(servers=SimpleNamespace(connected={"a": 1}), parity=SimpleNamespace(holds_step=""))
    nothing: Any = SimpleNamespace(is_shared=False, prompts_per_step=8, step=5)
    schedule = StepSchedule(nothing, nothing, cast(Any, network), cast(Any, ledger), *[nothing] * 5)
    assert schedule._describe_wait() == said


def test_each_value_of_a_column_has_scores_of_its_own() -> None:
    """Rows without a score count among their value's; a column of many values, or of none, is refused."""
    labels = labels_by("kind", ["sum", 2, "sum", None], "evaluation.by")
    found = scores_by_label(labels, [[(1.0, 2.0)], [(0.0, 0.0), None], [(0.0, 1.0)], [None]])
    assert list(found) == ["kind=2", "kind=None", "kind=sum"]
    assert (found["kind=sum"].accuracy, found["kind=sum"].reward, found["kind=sum"].rows) == (0.5, 1.5, 2)
    assert (found["kind=2"].accuracy, found["kind=2"].errors) == (0.0, 1)
    record = {f"accuracy/{label}": scores.accuracy for label, scores in found.items() if scores.errors < 1}
    assert accuracies_by_label({"accuracy": 0.3, **record, "accuracy/kind=None": None}) == "kind=sum 0.500"
    with pytest.raises(UserError, match=r"evaluation\.by is 'id', which has 51 values, over 50"):
        labels_by("id", range(51), "evaluation.by")


def test_a_run_refuses_a_column_that_no_held_out_row_has(make_config: MakeConfig) -> None:
    config = make_config(evaluation={"by": "kinds"})
    with pytest.raises(UserError, match=r"no row has a column 'kinds'\. Columns: .*kind"):
        TicketWriter(config.ticket_settings, PromptProcessor(config.model), (1,))
