"""Python's side of a run: start one with functions and rows of a script or notebook, and read it afterwards.

`asyncrl.train`, `asyncrl.load` and `asyncrl.Run` are these; the command line starts the same run from files.
"""
