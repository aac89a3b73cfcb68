"""Decode steps of the `hf` engine as CUDA graphs.

Reading order: `plugin` (description), `choice` (what an engine takes at its start), `batch` (one step), `slots` (the
cache, whose memory stays), `graphs` (what was captured), `memory` (line of the memory plan).
"""
