"""The model itself, as both services see it. Reading order:

`loading` (a folder becomes a model) -> `parts` and `lora` (which weights are trained) -> `sampling_distribution`
(the log-prob that both sides share) -> `output_head` (log-probs with few logits in memory) -> `published` (tensors
that travel as weights) -> `export`.
"""
