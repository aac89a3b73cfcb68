"""`asyncrl inspect RUN`: look at any sample of a run, in the terminal or in a browser. Starts fast: no torch.

`query` (what is asked for) -> `listing`, `group` (the terminal) -> `records` (JSON) -> `server`, `page` (the browser).
"""
