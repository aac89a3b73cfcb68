"""`asyncrl doctor`: what is wrong with a machine and a configuration, found before money is spent.

`examine` runs the checks of the other files in order; every check yields findings. `trial` runs the real thing, small.
"""
