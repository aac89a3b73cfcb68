"""`asyncrl import-config`: configurations of RLLaVA and EasyR1 become ours.

Reading order: `foreign_config` (reads their file), `rules` (what each key is here), `derived_rules` (keys whose meaning
depends on others), `translation` (applies the rules), `write` (YAML, account and reward adapter).
"""
