"""Descriptions of the rewards of length and repetition, each by its name in `reward.functions`."""

from __future__ import annotations

from asyncrl.plugins import Reward

NGRAM_REPETITION = Reward(implementation="asyncrl_plugins.shaping.rewards:ngram_repetition")
COSINE_LENGTH = Reward(implementation="asyncrl_plugins.shaping.rewards:cosine_length")
STOP_PROPERLY = Reward(implementation="asyncrl_plugins.shaping.rewards:stop_properly")
RELATIVE_LENGTH = Reward(implementation="asyncrl_plugins.shaping.rewards:relative_length", is_group=True)
DIVERSITY = Reward(implementation="asyncrl_plugins.shaping.rewards:diversity", is_group=True)
