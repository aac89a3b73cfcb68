"""`asyncrl inspect RUN`: look at any sample of a run, in the terminal or in a browser. Starts fast: no torch.

Reading order: `filters` (a query's words), `terminal` (lists and groups), `records` (JSON), `server` (the browser).
"""
