"""The channel `relay`: rollout servers send the versions that they pull over ZeroMQ on to each other (decision 022).

Reading order: `plugin`, `tree` (the learner's end: who sends to whom), `puller` (the server's end), `download` (a
version on its way), `relay` (a server's own endpoint for others).
"""
