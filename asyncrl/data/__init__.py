"""From files to prompts. Reading order:

`tables` (one Parquet or JSONL file, image folder or hub data set) -> `dataset` (several of them as one
sequence of rows) -> `images` (encoded bytes of images and videos) -> `prompts` (a row becomes messages and
image bytes) -> `prompt_sources` (which row comes next, resumable).
"""
