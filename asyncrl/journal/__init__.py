"""The journal of a run: each ticket, group and step on disk. `writer` writes it, `reader` opens it beside a learner."""

JOURNAL_FILE = "journal.sqlite"
"""Name of the journal in a run directory."""
