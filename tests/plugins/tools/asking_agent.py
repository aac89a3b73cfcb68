"""Agents that ask their model by OpenAI's own client."""

from __future__ import annotations

import base64

from openai import AsyncOpenAI

from asyncrl_plugins.tools.agent import AgentTask
from tests.rigs.pictures import picture

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


async def run(task: AgentTask) -> float:
    """Two turns with pictures, then an answer; what goes wrong where the row says so."""
    wish = task.row.get("wish", "")
    if wish == "silent":
        return 1.0
    url = "data:image/png;base64," + base64.b64encode(picture(42, 28)).decode()
    messages: list = [{"role": "user", "content": f"seed {task.seed % 7}"}]
    async with AsyncOpenAI(base_url=task.base_url, api_key="-", max_retries=0) as client:
        for turn in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
            again = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
            assert again == answer, "a request that is sent again is not sampled again"
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls or ():
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": f"{call.function.arguments} added"}
                )
            if turn == 1 and wish == "forget":  # a summary in place of the first turn, without its picture
                messages[1:3] = [{"role": "assistant", "content": "in short"}, {"role": "user", "content": "go on"}]
            if turn == 0 and wish == "edit":
                messages[0]["content"] = "something else"
            if turn == 0 and wish == "raise":
                raise RuntimeError("the agent's own service is down")
            seen = {"type": "image_url", "image_url": {"url": url}}
            if not said.tool_calls:
                messages.append({"role": "user", "content": [{"type": "text", "text": f"turn {turn}"}, seen]})
    return 0.5
