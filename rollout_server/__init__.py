"""The producer process. Reading order: `service` (its life), `link` (its socket), `production` (ticket to group),
`engines` (how tokens are sampled), `held_version`, `weights` (how new policies arrive), `device` (turns in sync mode).
"""
