"""`asyncrl report RUN [RUN ...]`: one self-contained HTML file about a run, or about several side by side.

Reading order: `reading` (a run directory), `charts` and `chart` (curves), `activity` and `timeline` (activity of each
process), `sample_cards`, `settings`, `verdict` (all findings); `page` and `comparison` put them together with
`templates`, and `write` makes the file.
"""
