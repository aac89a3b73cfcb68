"""Models as both services see them. Reading order:

`loading` (a folder becomes a model) -> `processing` (a prompt becomes exact token ids and pixels) ->
`model_inputs` (rotary positions, pixels and grids) -> `sampling_distribution` (what a log-prob means, on both sides) ->
`shared_prefix` (a group's prompt is computed once in training, by `prefix_kernels`) ->
`published` (what travels as weights).
"""
