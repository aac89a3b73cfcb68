"""Logging of a service: one line per record, with time, service and level."""

from __future__ import annotations

import logging
import sys

NOISY_LIBRARIES = (
    *("absl", "asyncio", "datasets", "filelock", "fsspec", "httpcore", "httpx", "huggingface_hub", "matplotlib"),
    *("PIL", "torch", "transformers", "urllib3", "wandb"),
)
"""Libraries of which only warnings are shown."""


def configure_logging(service: str, level: str | int = "INFO") -> None:
    """Send every record of this process to stderr, replacing earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s {service.replace('%', '%%')} %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for library in NOISY_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
