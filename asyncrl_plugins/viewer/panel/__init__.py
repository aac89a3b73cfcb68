"""Live panel of a run in the terminal: `run_snapshot` reads, `answers` and `panel` lay out, `display` repeats it."""
