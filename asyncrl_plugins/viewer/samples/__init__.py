"""A run's samples, read from the journal and its index: `query` finds rows of lists, `store` reads groups in full."""
