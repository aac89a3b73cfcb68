"""Parts of `benchmarks/against_trl.py`: length laws, a run of TRL, a bare loop."""
