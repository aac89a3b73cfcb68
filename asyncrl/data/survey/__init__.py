"""Survey of rows before a run begins, with the model's processor: usable rows, their lengths, held-out prompts."""
