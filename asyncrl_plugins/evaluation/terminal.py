"""An episode in the terminal: what is shown of it, and turns that are typed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.messages import TextPart

if TYPE_CHECKING:
    from asyncrl.data.prompts import RenderedPrompt
    from asyncrl.environments.recording import Decode
    from protocol.messages import Group, ObservedMessage


class Terminal:
    """Prints an episode; images are files in `folder`, which are named where they stand."""

    def __init__(self, folder: Path, tokens: Callable[[bytes], str]) -> None:
        """`tokens` describes the number of tokens of an encoded image."""
        self._folder = folder
        self._tokens = tokens
        self._images: list[bytes] = []
        """Images so far, by their numbers."""

    def __call__(self, kind: str, part: Any) -> None:
        match kind:
            case "message":
                pass
            case "turn":
                print(f"--- turn {part}")
            case "reward":
                for call in part.info.get("calls", ()):
                    error = f": {call['error']}" if call["error"] else ""
                    print(f"    call {call['name']} {call['arguments']}{error}")
                print(f"    reward {part.reward:g}{', done' if part.done else ''}   {_plain(part.info)}")
            case "history":
                print("    the history is rewritten, and a new segment begins: behind the prompt the next turn sees")
                for text, shown in part:
                    print(f"    | policy: {text}")
                    for message in shown.messages:
                        parts = (self._again(each) if isinstance(each, bytes) else each for each in message.parts)
                        print(f"    | {message.role}: {' '.join(parts)}")
                print("    and then")
            case _ if isinstance(part, bytes):
                print(f"  {kind}: {self._image(part)}")
            case _:
                print(f"  {kind}: {part}")

    def prompt(self, rendered: RenderedPrompt) -> None:
        images = iter(rendered.prompt.image_hashes)
        for message in rendered.prompt.messages:
            for part in message.content:
                self(message.role, part.text if isinstance(part, TextPart) else rendered.blobs[next(images)])

    def trajectory(self, group: Group, decode: Decode) -> None:
        """The first one of a group that a model has played."""
        record = group.trajectories[0]
        self._observed(group, group.opening)
        for number, turn in enumerate(record.turns):
            self("turn", number)
            self("policy", decode(group.token_ids[turn.start : turn.end]))
            for call in turn.calls:
                print(f"    call {call.name} {call.arguments}{f': {call.error}' if call.error else ''}")
            if turn.reward is not None:
                print(f"    reward {turn.reward:g}   {turn.info}".rstrip())
            self._observed(group, turn.observation)
        if record.reward is None:
            print(f"end: {record.error_kind}: {record.error_message}   no reward: a run leaves such a trajectory out")
        else:
            print(f"end: {record.end}   reward {record.reward:g} in {len(record.turns)} turns")

    def _observed(self, group: Group, messages: Sequence[ObservedMessage]) -> None:
        for message in messages:
            for part in message.content:
                self(message.role, part.text if isinstance(part, TextPart) else bytes(group.blobs[part.content_hash]))

    def _again(self, data: bytes) -> str:
        return f"[image {self._images.index(data)}]"

    def _image(self, data: bytes) -> str:
        from asyncrl.data.images import image_size

        width, height = image_size(data, "an image")
        suffix = "png" if data.startswith(b"\x89PNG") else "jpg"
        number = len(self._images)
        self._images.append(data)
        path = self._folder / f"{number:03d}.{suffix}"
        path.write_bytes(data)
        return f"[image {number}: {width} x {height}, {self._tokens(data)} tokens, {path}]"


def by_unit(unit: int) -> Callable[[bytes], str]:
    """Numbers of tokens where a token is a square of so many pixels at its side, as in the Qwen family."""

    def about(data: bytes) -> str:
        from asyncrl.data.images import image_size

        width, height = image_size(data, "an image")
        return f"about {round(width / unit) * round(height / unit)}"

    return about


def _plain(info: dict[str, Any]) -> str:
    shown = [f"{key}={value}" for key, value in info.items() if key != "calls"]
    return " ".join(shown)


def typed_turns() -> Iterator[str]:
    """Turns from the terminal, until its end. A line that ends with a backslash goes on in the next."""
    lines: list[str] = []
    while True:
        try:
            lines.append(input(". " if lines else "> "))
        except EOFError:
            return
        if not lines[-1].endswith("\\"):
            yield "\n".join(line.removesuffix("\\") for line in lines)
            lines = []
