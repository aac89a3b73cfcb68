"""Plug-ins of asyncrl, one folder each. The core imports none of them: it finds them through entry points."""
