"""Environments answer a model that takes several turns: an observation, a reward, or the end."""
