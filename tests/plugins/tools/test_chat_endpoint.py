"""HTTP of the chat endpoint: the answers to requests that are not served."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from asyncrl_plugins.tools import chat_endpoint
from asyncrl_plugins.tools.chat_endpoint import ChatEndpoint, ChatSession

WRONG_MESSAGES = {
    "1": "a message is int",
    "[]": "a message is list",
    "{}": "`role` of a message is NoneType",
    '{"role": 7}': "`role` of a message is int",
    '{"role": "user", "content": 5}': "`content` of a message is int",
    '{"role": "user", "content": [1]}': "a part of `content` is int",
    '{"role": "user", "content": [{"type": "text"}]}': "`text` of a part is NoneType",
    '{"role": "user", "content": [{"type": ["text"]}]}': "`type` of a part is list",
    '{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}': "`image_url` of a part is str",
    '{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 1}}]}': "`url` of an image is int",
    '{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,a"}}]}': "base64-encoded",
    '{"role": "assistant", "tool_calls": {}}': "`tool_calls` of a message is dict",
    '{"role": "assistant", "tool_calls": [1]}': "a tool call is int",
    '{"role": "assistant", "tool_calls": [{"function": []}]}': "`function` of a tool call is list",
    '{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}': "`arguments` of a tool call is NoneType",
    '{"role": "user", "content": "\\ud800"}': "surrogates not allowed",
    f'{{"role": "user", "content": {"[" * 100}1{"]" * 100}}}': "nested more than 64 deep",
    '{"role": "user", "content": %s' % ("[" * 100_000): "nested more than 64 deep",
    '{"role": "user", "content": %s' % ("9" * 5000): "Exceeds the limit",
}
"""Content of `messages`, and words of the answer."""


def test_a_request_that_is_not_served_is_told_why() -> None:
    async def run() -> None:
        endpoint, session = ChatEndpoint(), ChatSession()
        await endpoint.start("127.0.0.1")
        url = endpoint.open(session)
        async with aiohttp.ClientSession() as client:

            async def post(path: str, content: Any) -> tuple[int, str]:
                async with client.post(path, data=content) as reply:
                    return reply.status, (await reply.json())["error"]["message"]

            async with client.get(f"{url}/models") as reply:
                assert (await reply.json())["data"][0]["id"] == "policy"
            chat = f"{url}/chat/completions"
            for content, why in WRONG_MESSAGES.items():
                status, said = await post(chat, b'{"messages": [%s]}' % content.encode())
                assert (status, why in said) == (400, True), (content, said)
            for content, why in (
                (b"{", "Expecting property name"),
                (b"[]", "no messages"),
                (b'{"messages": [1]}', "a message is int"),
                (b'{"messages": [{"role": "user"}], "n": 2}', "n=2 is not served"),
                (b'{"messages": [{"role": "user"}], "stream": true}', "stream=True is not served"),
            ):
                status, said = await post(chat, content)
                assert status == 400
                assert why in said
            assert (await post(f"{url}/embeddings", b"{}"))[0] == 404
            assert (await post(chat.replace(url.split("/")[3], "0" * 32), b"{}"))[0] == 404
            assert (await post(chat, b"x" * (chat_endpoint.MAX_BODY_BYTES + 1)))[0] == 413
            waiting = asyncio.create_task(post(chat, b'{"messages": [{"role": "user", "content": "a"}]}'))
            await session.requests.get()
            assert await post(chat, b'{"messages": [{"role": "user", "content": "b"}]}') == (
                400,
                "another request of this trajectory is being answered: ask for one turn after the other",
            )
            endpoint.close(url)
            assert await waiting == (400, "the trajectory has ended")
            assert (await post(chat, b"{}"))[0] == 404

    asyncio.run(run())


def test_a_stranger_is_turned_away_before_anything_is_read() -> None:
    """100 MiB are announced, and none of them is sent: the answer does not wait for them."""

    async def run() -> None:
        endpoint = ChatEndpoint()
        await endpoint.start("127.0.0.1")
        url = endpoint.open(ChatSession())
        host, _, port = url.split("/")[2].partition(":")
        for secret in ("0" * 32, "", url.split("/")[3].upper(), "%2e%2e"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /{secret}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {100 << 20}\r\n\r\n"
            writer.write(head.encode())
            status = await asyncio.wait_for(reader.readline(), 5)
            assert status.startswith(b"HTTP/1.1 404 "), (secret, status)
            writer.close()

    asyncio.run(run())
