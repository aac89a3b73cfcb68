"""Configurations of RLLaVA and EasyR1 become ours: `asyncrl import-config`. Reading order: `theirs` (what they wrote),
`rules` (each of their keys), `derived` (those that need more than one), `importing`, `writing`."""
