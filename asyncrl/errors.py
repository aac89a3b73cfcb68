"""Mistakes that the user can mend. The command line prints their message alone and exits with 2."""

from __future__ import annotations


class UserError(Exception):
    """Something in the configuration, the data or the machine. The message says what, the values, and the fix."""


class BadStateError(Exception):
    """The run cannot go on honestly (NaN loss, protocol violation). It stops with this as its saved reason."""
