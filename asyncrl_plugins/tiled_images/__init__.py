"""Model families whose images are cut into tiles of one size, or stand between tokens that the processor writes.

Reading order: `plugin` (descriptions), `families` (one class each).
"""
