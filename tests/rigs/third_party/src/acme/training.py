"""A policy loss."""

from acme.plugin import DoubledConfig
from asyncrl.algorithms.losses import PolicyLoss


def acme_doubled(tokens, config):
    factor = config.settings_of(DoubledConfig).factor
    return PolicyLoss(-factor * tokens.advantages * tokens.logprobs, {})
