"""A real Prometheus with the project's configuration, scraping processes of this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

PROMETHEUS = shutil.which("prometheus")
CONFIGURATION = Path(__file__).parents[2] / "docker" / "prometheus"


class Prometheus:
    def __init__(self, folder: Path, targets: Mapping[str, Sequence[int]], port: int, arguments: Sequence[str]):
        """`targets`: ports of this machine by job. `arguments`: of docker-compose.yml, with its container's folders."""
        assert PROMETHEUS is not None
        folder.mkdir()
        configuration = yaml.safe_load((CONFIGURATION / "prometheus.yml").read_text())
        # A scrape may take as long as the interval: a service that loads its model on a busy machine needs a second.
        configuration["global"] = {"scrape_interval": "3s", "evaluation_interval": "1s"}
        for job in configuration["scrape_configs"]:
            del job["dns_sd_configs"]  # there is no such name server here
            addresses = [f"127.0.0.1:{target}" for target in targets[job["job_name"]]]
            job["static_configs"] = [{"targets": addresses}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        shutil.copy(CONFIGURATION / "alerts.yml", folder)
        replaced = [
            word.replace("/etc/prometheus", str(folder)).replace("=/prometheus", f"={folder}/data")
            for word in arguments
        ]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [PROMETHEUS, *replaced, f"--web.listen-address=127.0.0.1:{port}"], stdout=self._log, stderr=self._log
        )

    def is_ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Series of an instant query: `metric` and `value`. `at`: Unix time."""
        parameters = {"query": expression} | ({} if at is None else {"time": f"{at:.3f}"})
        result = self._get("query", parameters)["result"]
        return [] if isinstance(result[0] if result else None, float) else result

    def value(self, expression: str) -> float | None:
        """Value of the first series; None without any."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Alerting rules by name."""
        groups = self._get("rules", {"type": "alert"})["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def _get(self, what: str, parameters: Mapping[str, str]) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()
