"""`asyncrl report RUN [RUN ...]`: one self-contained HTML file about a run, or about several side by side.

Reading order: `charts` and `chart` (curves), `activity` and `timeline` (activity of each process), `sample_cards`,
`settings`; `page` and `comparison` put them together with `templates`, and `write` makes the file.
`asyncrl/tools/recorded_run.py` reads a run directory, `asyncrl/tools/findings.py` says what is wrong with it.
"""
