"""`asyncrl report RUN [RUN ...]`: one self-contained HTML file about a run, or about several side by side.

Reading order: `run` (what a run directory says), `limits` and `findings` (what is wrong with it), `series`, `chart` and
`charts` (curves), `activity` and `timeline` (who did what), `samples`, `configuration`, `environment`; `page` and
`comparison` put them together.
"""
