"""A small MCP server over stdin and stdout, with the real package."""

from __future__ import annotations

import asyncio
import io
import os

from mcp.server.mcpserver import Image, MCPServer
from PIL import Image as Pillow

server = MCPServer("rig")
seen = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def picture(width: int) -> Image:
    """Show a red picture."""
    buffer = io.BytesIO()
    Pillow.new("RGB", (width, 60), "red").save(buffer, "PNG")
    return Image(data=buffer.getvalue(), format="png")


@server.tool()
def count() -> str:
    """Count the calls of this session."""
    global seen
    seen += 1
    return str(seen)


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no such page")


@server.tool()
async def wait() -> str:
    """Wait for a minute."""
    await asyncio.sleep(60)
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    os.write(2, b"out of memory\n")
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
