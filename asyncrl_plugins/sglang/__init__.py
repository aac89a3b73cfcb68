"""SGLang as an engine: `launch_server` in an environment and processes of its own, spoken to over HTTP.

Reading order: `engine`, `conversion` (requests and answers), `weights` (new versions), `arguments` and `process` (its
start and end), `client`, `rules` (what is refused). `launch.py` and `kernel_stand_in.py` run over there.
"""
