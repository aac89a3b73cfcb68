"""A method as a configuration sees it: its row in a dict, without torch.

Rows of the core are in `methods.py`, those of a plug-in in its own file, and a user's file may have some, too. Looking
one up by its name: `installed_methods.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from asyncrl.config.sections import Section
from asyncrl.plugins import no_problems

Kind = Literal[
    "advantage", "policy_loss", "selection", "group_filter", "addition", "ticket_hook", "loss_hook", "prompt_source",
    "replay_buffer", "staleness_controller", "token_trace",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
BY_SECTION: tuple[Kind, ...] = (
    "addition", "ticket_hook", "loss_hook", "prompt_source", "replay_buffer", "staleness_controller",
    "token_trace",
)  # fmt: skip
"""Kinds whose methods go with any other, each chosen by its section `algorithm.NAME`."""
CHOICE_KEYS: Mapping[Kind, str] = {
    "advantage": "adv_estimator",
    "policy_loss": "policy_loss",
    "selection": "selections",
    "group_filter": "filters",
}
"""Keys of the `algorithm` section that choose methods of the other kinds, by their names."""
NEEDS: Mapping[str, str] = {
    "proximal": "log-probs of the policy at the start of the step, over the whole batch",
    "entropies": "entropies of the policy at the start of the step, over the whole batch",
    "squared_probabilities": "sums of the squared probabilities of the policy at the start of the step, over the whole "
    "batch",
    "reference": "log-probs of the reference policy",
    "critic": "values of a critic",
    "greedy_row": "a greedy completion in every group, scored and not trained",
    "turns": "trajectories of several turns, in an environment",
    "inserted": "tokens that a ticket hook inserts, among the trained ones",
    "target": "texts of data.target_key",
    "total_steps": "the number of steps of the run",
}
"""Needs of a method besides scores, groups and behaviour log-probs."""

TAKES_FROM: Mapping[str, str] = {
    "loss": "all that the token adds to the loss",
    "policy_loss": "the token's policy loss; its entropy bonus and KL stay",
    "batch": "its whole trajectory, which is not trained: no denominator counts it",
}
"""Effect of a selection on the tokens that it chooses. Only the last changes a denominator."""

NO_CORRECTION: Mapping[str, Any] = {"correction": {"kind": "none"}}
"""Default of losses that weigh by target over behaviour themselves."""


@dataclass(frozen=True)
class Method:
    """An advantage estimator, policy loss, selection, group filter, or an addition to any of them, such as a hook."""

    implementation: str
    """`module:function`, imported when the method is used; the function has the method's name."""
    _: KW_ONLY
    formula: str = ""
    """One line."""
    paper: str = ""
    """arXiv number; empty where there is none."""
    needs: Set[str] = frozenset()
    """Keys of NEEDS."""
    settings: type[Section] | None = None
    """The method's own settings: `algorithm.NAME`, a section that exists only where the method is chosen. An addition
    is chosen by giving this section."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys of the `algorithm` section that are left out where this method is chosen."""
    problems: Callable[[Any], Iterable[str]] = no_problems
    """Errors of a configuration (RunConfig) that chooses the method, each with its fix."""
    notes: Callable[[Any, int], Iterable[str]] = lambda config, total_steps: ()
    """Remarks of `--dry-run` on schedules that a run of so many steps is too short for."""
    models: Callable[[Any], Mapping[str, str]] = lambda config: {}
    """Folders of models that a loss hook loads in the learner, by the settings that name them, from a RunConfig."""
    plain_scores: bool = False
    """Read scores or components as they were given, so that no penalty may be in them."""
    compares_rows: bool = False
    """Estimator: credit rows of a group by each other, so that a group of one gets none."""
    weighs_behaviour: bool = False
    """Loss: weigh by target over behaviour policy itself, so that no correction may."""
    weighs_trajectories: bool = False
    """Loss: a ratio in it is that of a whole trajectory, all of whose tokens must be there."""
    marks: str = ""
    """Loss: the selection whose tokens are `tokens.marked`, treated in the loss's own way."""
    credits_inserted: bool = False
    """Loss: completions that are inserted whole are members of their group, whose scores count in its statistics and
    which get an advantage."""
    shares_denominator: bool = False
    """Loss: `loss_agg_mode` is over inserted and sampled tokens together, not over the sampled ones beside a mean over
    the inserted ones."""
    inserts: Callable[[Any], int] | None = None
    """Ticket hook: insert tokens, which losses that need `inserted` learn from. Gives, from its settings, how many of a
    group's last trajectories it may insert whole."""
    bytes_per_token: Callable[[Any], int] = lambda config: 0
    """Token trace: bytes that it adds to each token of a group, from a RunConfig. Imports no torch."""
    takes_from: str = "loss"
    """Selection: key of TAKES_FROM."""
    name: str = ""
    """Key in the dict, set at the look-up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))
        if self.weighs_behaviour:
            object.__setattr__(self, "defaults", {**self.defaults, **NO_CORRECTION})


@dataclass(frozen=True, kw_only=True)
class MethodSet:
    """Methods of the core, or of a plug-in as its entry point of the group `asyncrl.methods`: name -> row, by kind."""

    advantages: Mapping[str, Method] = field(default_factory=dict)
    """`f(trajectories, config) -> Credit`, values of `algorithm.adv_estimator`."""
    policy_losses: Mapping[str, Method] = field(default_factory=dict)
    """`f(tokens, config) -> PolicyLoss`, values of `algorithm.policy_loss`."""
    selections: Mapping[str, Method] = field(default_factory=dict)
    """`f(trajectories, credit, config) -> [N] bool`, names in `algorithm.selections`."""
    group_filters: Mapping[str, Method] = field(default_factory=dict)
    """`f(group, config) -> reason or None`, names in `algorithm.filters`."""
    additions: Mapping[str, Method] = field(default_factory=dict)
    """Parts of the core that go with any method, each chosen by its section `algorithm.NAME`."""
    ticket_hooks: Mapping[str, Method] = field(default_factory=dict)
    """Classes of a `TicketHook` (learner/tickets/ticket_hook.py), each chosen by its section `algorithm.NAME`."""
    loss_hooks: Mapping[str, Method] = field(default_factory=dict)
    """Classes of a `LossHook` (learner/training/loss_hook.py), each chosen by its section `algorithm.NAME`."""
    prompt_sources: Mapping[str, Method] = field(default_factory=dict)
    """Classes of a `PromptSource` (asyncrl/data/prompt_sources.py), each chosen by its section `algorithm.NAME`."""
    replay_buffers: Mapping[str, Method] = field(default_factory=dict)
    """Classes of a `ReplayBuffer` (learner/tickets/replay_buffer.py), each chosen by its section `algorithm.NAME`."""
    staleness_controllers: Mapping[str, Method] = field(default_factory=dict)
    """Classes of a `StalenessController` (learner/loop/trainer.py), each chosen by its section `algorithm.NAME`."""
    token_traces: Mapping[str, Method] = field(default_factory=dict)
    """Classes of a `TokenTrace` (asyncrl/models/token_trace.py), each chosen by its section `algorithm.NAME`."""
    overlays: Path | None = None
    """Folder of YAML files `NAME.yaml`, each the word for a whole method."""

    def rows(self, kind: Kind) -> Mapping[str, Method]:
        by_kind = (
            self.advantages, self.policy_losses, self.selections, self.group_filters, self.additions,
            self.ticket_hooks, self.loss_hooks, self.prompt_sources, self.replay_buffers,
            self.staleness_controllers, self.token_traces,
        )  # fmt: skip
        return by_kind[KINDS.index(kind)]
