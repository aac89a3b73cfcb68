"""`asyncrl doctor`: checks machine and configuration before a run.

`examine` runs the checks of the other files in order; every check yields findings. `trial` runs the real thing, small.
"""
