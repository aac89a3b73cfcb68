"""HTTP of the chat endpoint: the answers to requests that are not served."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from asyncrl_plugins.tools import chat_endpoint
from asyncrl_plugins.tools.chat_endpoint import ChatEndpoint, ChatSession


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
