"""The `vllm` engine. Reading order: `engine` (its life, sampling, new weights), `settings` (what vLLM is told and what
it may not be told), `versions` (what it needs installed), `outputs` (vLLM's answers as our columns), `usage` (what it
has done), `worker` (the part that runs inside vLLM's own process), `transfer` (channels from GPU to GPU)."""
