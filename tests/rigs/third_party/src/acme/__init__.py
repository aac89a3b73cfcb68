"""A small package of a third party: a loss, a reward, a rollout engine, a command and an option."""
