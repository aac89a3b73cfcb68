"""An environment as TRL's `environment_factory` takes it: methods are tools, `get_reward` is asked at the end."""

from __future__ import annotations

from PIL import Image


class Rooms:
    def __init__(self) -> None:
        self.opened = 0

    def reset(self, key: int, **kwargs: object) -> list[dict[str, object]]:
        self.key, self.opened = key, 0
        return [{"type": "text", "text": "Find the key."}, {"type": "image", "image": Image.new("RGB", (56, 56))}]

    def open_door(self, number: int) -> str:
        """
        Open a door.

        Args:
            number: Number of the door.

        Returns:
            What is behind it.
        """
        if number > 9:
            raise ValueError(f"there is no door {number}")
        if number < 0:
            raise OSError("the house is gone")
        self.opened += 1
        return "a key" if number == self.key else "nothing"

    async def look(self) -> list[dict[str, object]]:
        """
        Look around.
        """
        return [{"type": "image", "image": Image.new("RGB", (70, 56))}, {"type": "text", "text": "doors"}]

    def get_reward(self) -> float:
        return 0.5 * self.opened

    def _hidden(self) -> None: ...
