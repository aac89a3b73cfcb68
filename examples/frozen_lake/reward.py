"""FrozenLake rewards by itself; a run wants a function, too."""

from asyncrl.rewards.sample import RewardSample


def nothing(sample: RewardSample) -> float:
    return 0.0
