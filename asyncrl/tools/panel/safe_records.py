"""What can be shown of a run directory's records. A crash, a full disk or an editor may have left anything in them."""

from __future__ import annotations

from typing import Any

_LARGEST = 1e15
_STATUS: dict[str, type | tuple[type, ...]] = {
    "phase": str,
    "waiting_for": str,
    "time": (int, float),
    "step": int,
    "total_steps": int,
    "servers": list,
    "groups": dict,
    "errors": dict,
    "device": dict,
}


def sound_numbers(record: dict[str, Any]) -> dict[str, Any] | None:
    """Of a step or an evaluation: its numbers. None where there is no step."""
    if not (isinstance(record.get("step"), int) and _is_number(record["step"])):
        return None
    return {key: value for key, value in record.items() if value is None or _is_number(value)}


def sound_sample(record: dict[str, Any]) -> dict[str, Any]:
    """With its completions that have a score."""
    listed = record.get("completions")
    completions = [
        one
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict) and _is_number(one.get("reward")) and isinstance(one.get("text", ""), str)
    ]
    texts = {key: record[key] for key in ("prompt", "answer") if isinstance(record.get(key), str)}
    steps = {"step": record["step"]} if _is_number(record.get("step")) else {}
    return {**texts, **steps, "completions": completions}


def sound_status(record: dict[str, Any]) -> dict[str, Any]:
    """Fields of another type than theirs are not there."""
    status: dict[str, Any] = {
        key: value
        for key, value in record.items()
        if isinstance(value, _STATUS.get(key, object)) and (not isinstance(value, int | float) or _is_number(value))
    }
    if "servers" in status:
        status["servers"] = [server for server in status["servers"] if isinstance(server, dict)]
    return status


def _is_number(value: Any) -> bool:
    """That can be shown: finite, and no integer of a thousand digits."""
    return isinstance(value, int | float) and -_LARGEST < value < _LARGEST
