"""DeepSpeed's ZeRO as a training engine.

Reading order: `plugin` (its settings, refusals), `placement` (the weights on each rank), `updates`, `engine`, `memory`
(its lines of the memory plan).
"""
