"""Imports of torchvision and transformers for commands that look at prompts and end: without what the two load, too,
for work that such a command never does, which costs as much as all the rest. A process that trains or samples has no
use of them, but for `import_peft`. What has been imported already stays as it is.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from asyncrl.processing import torchvision_cpu

T = TypeVar("T")


def import_torchvision() -> None:
    """Import torchvision without torch's compiler, of which it takes two functions: one that an operator calls, which
    it still gets then, and one that keeps the compiler away from a function."""
    torchvision_cpu.install()
    compiler = {
        "torch._dynamo": {"disable": _left_as_it_is},
        "torch._dynamo.utils": {"is_compile_supported": _is_compile_supported},
    }
    with _stand_ins(compiler):
        import torchvision.transforms.v2  # noqa: F401


def import_peft() -> None:
    """Import PEFT and let it remember that bitsandbytes is not there, which it would load, and which may print, where
    that is installed. A plug-in whose layers are of bitsandbytes makes it look again."""
    with not_installed(("bitsandbytes",)):
        from peft.import_utils import is_bnb_available

        is_bnb_available()


def import_processors() -> None:
    """Import transformers' processors without its models, for a process that makes no model. Processors need of those a
    class to know tokenizers of sound by, a base class of automatic models, and the names of activations, which no
    setting of a processor has."""
    import_torchvision()
    models = {
        "transformers.activations": {"ACT2FN": {}},
        "transformers.generation.utils": {"GenerationMixin": type("GenerationMixin", (), {})},
        "transformers.modeling_utils": {"PreTrainedAudioTokenizerBase": type("PreTrainedAudioTokenizerBase", (), {})},
    }
    with _stand_ins(models):
        import transformers.models.auto.auto_factory
        import transformers.processing_utils  # noqa: F401


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from looking through all of torch's and transformers' objects while they are imported:
    an eighth of the time of a command that is short."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _stand_ins(modules: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Let modules that have not been imported have stand-ins with these names in them."""
    missing = {name: names for name, names in modules.items() if name not in sys.modules}
    for name, names in missing.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(names)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


@contextmanager
def not_installed(packages: tuple[str, ...]) -> Iterator[None]:
    """Let packages that have not been imported look as if they were not installed."""
    hidden = [package for package in packages if package not in sys.modules]
    for package in hidden:
        sys.modules[package] = None  # pyright: ignore[reportArgumentType]  # Python's own sign for it
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]


def _is_compile_supported(device_type: str) -> bool:
    from torch._dynamo.utils import is_compile_supported

    return is_compile_supported(device_type)


def _left_as_it_is(function: T, *_: Any, **__: Any) -> T:
    return function
