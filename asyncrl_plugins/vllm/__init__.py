"""The `vllm` engine. Reading order: `engine` (its life, sampling, new weights), `rules` (what it refuses), `start`
(vLLM's arguments and environment), `conversion` (requests in, completions out), `weights`, `sleep`, `usage`, and what
runs inside vLLM's own processes: `worker` and `engine_process`."""
