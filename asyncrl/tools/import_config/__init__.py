"""`asyncrl import-config`: configurations of RLLaVA, EasyR1, verl and TRL become ours.

Reading order: `foreign_config` and `verl_keys` (read their file), `rules` and `trl_rules` (what each key is here),
`derived_rules` (of keys whose meaning depends on others), `names` (of algorithms), `translation` (applies the rules),
`write` (YAML, account and reward adapter).
"""
