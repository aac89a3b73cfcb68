"""Secrets in settings of the user's own code: the text `env:NAME` stands for an environment variable, so that neither
config.yaml nor the journal or a tracker has its value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.errors import UserError

if TYPE_CHECKING:  # a reward worker reads no configuration
    from asyncrl.config.environment import EnvironmentConfig
    from asyncrl.config.sections import RewardConfig

REFERENCE = re.compile(r"env:([A-Za-z_]\w*)")
_LIKE_A_SECRET = re.compile(r"(?i)(api_?key|secret|password|passwd|(^|api_|auth_|access_|bearer_|hf_|github_)token)$")


def with_secrets(values: Any, setting: str) -> Any:
    """A copy of the values with environment variables in place of `env:NAME`, however deep. Raises UserError naming the
    key of `setting` and the variable that this process has not."""

    def resolve(value: str, key: str) -> str:
        name = REFERENCE.fullmatch(value)
        if name is None:
            return value
        if name[1] not in os.environ:
            raise UserError(
                f"{key} is {value!r}, but there is no environment variable {name[1]} in this process. Export it on "
                "each machine of the run, for learner and rollout servers, before they start"
            )
        return os.environ[name[1]]

    return _mapped(values, setting, resolve)


def without_secrets(text: str, values: Any) -> str:
    """An error's text with `env:NAME` in place of what `with_secrets(values)` has put there."""

    def hide(value: str, key: str) -> str:
        nonlocal text
        if (name := REFERENCE.fullmatch(value)) and (secret := os.environ.get(name[1])):
            text = text.replace(secret, value)
        return value

    _mapped(values, "", hide)
    return text


def secret_notes(environment: EnvironmentConfig, reward: RewardConfig) -> Iterator[str]:
    """Yield a sentence for each setting that looks like a secret, which files of the run and trackers will have."""
    texts: dict[str, str] = {}
    _mapped(environment.config, "environment.config", lambda text, key: texts.setdefault(key, text))
    for number, each in enumerate(reward.functions):
        _mapped(each.kwargs, f"reward.functions.{number}.kwargs", lambda text, key: texts.setdefault(key, text))
    for key, text in texts.items():
        name = key.rpartition(".")[2]
        if text and not REFERENCE.fullmatch(text) and _LIKE_A_SECRET.search(name):
            yield (
                f"{key} looks like a secret: config.yaml, the journal and trackers will have it. Write "
                f"env:{name.upper()}, and export that variable for learner and rollout servers"
            )


def _mapped(value: Any, key: str, change: Callable[[str, str], str]) -> Any:
    """The value with each text, however deep, changed by `change(text, key)`."""
    if isinstance(value, Mapping):
        return {name: _mapped(inner, f"{key}.{name}", change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, f"{key}.{number}", change) for number, inner in enumerate(value)]
    return change(value, key) if isinstance(value, str) else value
