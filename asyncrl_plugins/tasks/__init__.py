"""The task library: visual tasks, each a word on the command line (`asyncrl train base.yaml geo3k`).

A task is an overlay in `overlays/` (data source, columns, prompt template, weights of its rewards; shown as
`configs/tasks/`) and a few reward functions:

1. `completions.py`    parts of a completion: thinking, answer, the format that a template asks for, literals
2. `maths.py`          geo3k: a boxed result, graded by math-verify
3. `counting.py`       clevr_count: one number
4. `boxes.py`          boxes and points in text, their scales, IoU
5. `grounding.py`      grounding, grounding_fractions: one box for a sentence
6. `detection.py`      detection: all boxes of a category, with confidences
7. `text_match.py`     token F1 and exact match
8. `mat.py`            mat_search, mat_code: the next action of an agent
9. `gui.py`            gui_step: the next action on a screenshot
10. `we_math.py`       we_math: options and values, and the benchmark's four dimensions
11. `visual_agents.py` deepeyes, mat_search_turns, mat_code_turns: tools and answers of several turns

Each function scores what stands behind the thinking, runs and evaluates nothing that a model wrote, and raises
ValueError for a row whose reference it cannot read: that is a broken row and no wrong completion. Sources, columns and
formulas are in README.md, cases computed by hand in tests/plugins/tasks/test_tasks.py.
"""
