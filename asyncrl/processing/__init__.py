"""From messages and image bytes to token ids, positions and pixels: the alignment contract of both services.

Reading order: `encoded_prompt` (the result) -> `processor` (a prompt becomes exact token ids and pixels) ->
`image_grids` (tokens of an image of known size) -> `bridge` (tokens between two turns) -> `history` (turns that a
later turn sees) -> `model_inputs` (rotary positions, pixels and grids for the model).
"""
