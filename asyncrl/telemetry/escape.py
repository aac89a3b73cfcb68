"""Characters that must not reach a terminal or a page as they are, as text."""

from __future__ import annotations


def code_of(character: str) -> str:
    """As Python writes it in a string: `\\x1b`, `\\u202e`, `\\U000e0001`."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
