"""Write the generated pages docs/configuration.md and docs/metrics.md; tests/tools/test_docs.py compares them."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.explain import config_reference
from asyncrl.telemetry.metric_set import document
from learner.reporting.metric_table import METRICS as LEARNER_METRICS
from rollout_server.metric_table import METRICS as ROLLOUT_METRICS

DOCS = Path(__file__).parent.parent / "docs"


def pages() -> dict[str, str]:
    """File name -> text."""
    metrics = (
        "# Metrics\n\nBoth processes answer `GET /metrics` (`telemetry.learner_port`, `telemetry.rollout_port`). "
        "Every series has the label `run`, the run directory as the configuration has it. "
        "A gauge is NaN as long as it has no value. Written by `scripts/make_docs.py` from the tables in code.\n\n"
        f"## Learner\n\n{document(LEARNER_METRICS).strip()}\n\n"
        f"## Rollout server\n\n{document(ROLLOUT_METRICS).strip()}\n"
    )
    return {"configuration.md": config_reference().strip() + "\n", "metrics.md": metrics}


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
