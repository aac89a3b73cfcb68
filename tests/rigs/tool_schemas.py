"""A tool's schema, and the opening of a chat template that lists tools."""

from __future__ import annotations

LISTS_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}{{ t | tojson }}{% endfor %} Call as "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
)
"""Opening of templates such as those of Qwen2.5."""
CROP = {
    "type": "function",
    "function": {
        "name": "crop",
        "description": "Show a part larger.",
        "parameters": {
            "type": "object",
            "properties": {
                "row": {"type": "integer", "description": "row of the grid"},
                "size": {"type": "string", "enum": ["s", "l"], "default": "s", "description": "how large"},
            },
            "required": ["row"],
        },
    },
}
