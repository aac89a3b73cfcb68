"""Worker processes of rewards and environments on machines of their own: `asyncrl pool`, and the way to it."""
