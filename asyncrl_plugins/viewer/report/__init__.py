"""`asyncrl report RUN [RUN ...]`: one self-contained HTML file about a run, or about several side by side.

Reading order: `charts` and `chart` (curves), `activity` and `timeline` (activity of each process), `sample_cards`,
`settings`; `page` and `comparison` put them together with `templates`, and `write` makes the file.
`asyncrl/recorded_run/run.py` reads a run directory, `asyncrl/recorded_run/findings.py` says what is wrong with it.
"""
