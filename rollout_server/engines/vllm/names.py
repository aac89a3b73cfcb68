"""Names that the rollout server and vLLM's own processes must agree on. Imports nothing."""

BACKEND = "asyncrl"
"""Of `worker.WeightTransfer`, in vLLM's table of weight-transfer backends."""
BANNED_KEY = "asyncrl_banned_token_ids"
"""Ids that can never be sampled, in vLLM's `additional_config`."""
