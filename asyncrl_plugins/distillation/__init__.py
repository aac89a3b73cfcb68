"""On-policy distillation: a teacher scores what the student samples.

Reading order: `plugin` (the method's row, settings, refusals), `advantages`.
"""
