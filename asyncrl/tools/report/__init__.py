"""`asyncrl report RUN [RUN ...]`: one self-contained HTML file about a run, or about several side by side.

Reading order: `recorded_run` (what a run directory says), `findings` (what is wrong with it), `chart` and `charts`
(curves), `activity` and `timeline` (who did what), `sample_cards`, `settings`; `page` and `comparison` put them
together with `templates`, and `write` makes the file.
"""
