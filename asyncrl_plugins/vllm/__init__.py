"""The `vllm` engine: an `AsyncLLM` in the rollout server, its core and workers in processes of their own.

Reading order: `engine` (its life, sampling, new weights), `rules` (what it refuses), `start` (vLLM's arguments and
environment), `memory` (its lines of the memory plan), `conversion` (requests in, completions out), `weights`, `sleep`,
`usage`, and what runs inside vLLM's own processes: `worker` and `engine_process`.
"""
