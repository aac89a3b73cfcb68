"""The `vllm` engine. Reading order: `engine` (its life, sampling, new weights), `start` and `settings` (what vLLM is
told, and what it may not be), `requests` and `outputs` (what goes into it and what comes out), `adapter` (low-rank
adapters), `sleep`, `versions` and `library` (what it needs installed), `usage` (what it has done), `worker` and `owner`
(what runs inside vLLM's own processes), `transfer` and `staging` (how weights get there), `names` (what both sides call
things)."""
