"""Descriptions of the parts. No torch: configurations are checked without it."""

from pydantic import Field

from asyncrl.config.method import Method, MethodSet
from asyncrl.config.parts import RolloutEngine
from asyncrl.config.sections import Section
from asyncrl.plugins import Command, Option, Reward


class DoubledConfig(Section):
    factor: float = Field(default=2.0, gt=0)
    """Factor of the loss."""


METHODS = MethodSet(
    policy_losses={"acme_doubled": Method("acme.training:acme_doubled", formula="-2 a log p", settings=DoubledConfig)}
)
SHORT = Reward(implementation="acme.rewards:short")
ENGINE = RolloutEngine(implementation="acme.sampling:AcmeEngine")
GREET = Command(
    help="greet someone",
    run="acme.commands:greet",
    add_arguments=lambda parser: parser.add_argument("name"),
)
NOTE = Option(
    command="train", flag="--acme-note", run="acme.commands:note", settings={"metavar": "TEXT", "help": "a note"}
)
