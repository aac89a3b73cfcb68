"""The `vllm` engine. Reading order: `engine` (its life, sampling, new weights), `requests` and `outputs` (what goes
into vLLM and what comes out), `adapter` (low-rank adapters), `sleep`, `settings` (what vLLM is told, and what it may
not be), `versions` and `library` (what it needs installed), `usage` (what it has done), `worker` and `owner` (what runs
inside vLLM's own processes), `transfer` (how weights get there), `names` (what the two sides call things)."""
