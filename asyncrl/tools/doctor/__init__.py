"""`asyncrl doctor`: what is wrong with a machine and a configuration, found before money is spent.

`examine` is the order of the checks, one file each; every check yields findings. `trial` runs the real thing, small.
"""
