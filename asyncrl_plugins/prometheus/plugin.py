"""Descriptions of the exporter and of the command `asyncrl health`."""

from __future__ import annotations

from asyncrl.plugins import Command, Exporter

EXPORTER = Exporter(
    learner="asyncrl_plugins.prometheus.learner:PrometheusLearner",
    rollout_server="asyncrl_plugins.prometheus.server:PrometheusServer",
)
HEALTH = Command(
    help="exit code 0 if the service behind a metrics endpoint does its work",
    run="asyncrl_plugins.prometheus.health:run",
    add_arguments=lambda parser: parser.add_argument(
        "url", metavar="URL", help="such as http://127.0.0.1:9101/metrics"
    ),
)
