"""The producer process. Reading order: `service` (its life), `link` (its socket), `production` (ticket to group),
`engines` (how tokens are sampled), `weights` (how new policies arrive)."""
