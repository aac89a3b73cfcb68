"""Cost of watching a run: recording, panel and scrapes, each as a ratio within one real run of the demo.

    asyncrl demo --steps 1 --folder runs/demo                         # data and warm start, once
    python benchmarks/recording_cost.py --demo runs/demo [--steps 150] [key=value ...]

Both services run as `asyncrl train` starts them, under its panel in a terminal of 110 x 40, scraped every 5 s by
Prometheus where there is one, else by this program. Measured inside the processes themselves:

- recording: seconds that the learner's main thread spends in its Reporter (metrics, samples, images, status, what
  trackers are handed), from the end of the first step to the end of the last, over the seconds between those;
- panel: CPU seconds of the process that shows it and watches over the services, over the seconds that it is shown;
- scrapes: CPU seconds of the threads that answer, over the CPU seconds of their process between its first scrape and
  its last.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import json
import os
import pty
import shutil
import socketserver
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.launch.ports import free_port

ROOT = Path(__file__).parent.parent
SCRAPE_EVERY_S = 5.0
TARGETS = {"recording": 0.02, "panel": 0.02, "recording and panel": 0.02, "scrapes": 0.01}
RESULTS = "RECORDING_COST_RESULTS"
"""Environment variable: folder that each process writes what it measured to."""


def save(name: str, measured: dict[str, Any]) -> None:
    (Path(os.environ[RESULTS]) / f"{name}.json").write_text(json.dumps(measured))


# --- inside the processes ------------------------------------------------------------------------


def measure_recording() -> None:
    """Measure recording in the learner."""
    from asyncrl.telemetry.tracker import TrackerThread
    from learner.reporting.reporter import Reporter

    spent: dict[str, float] = {}
    marks: list[tuple[float, dict[str, float]]] = []
    trackers: dict[str, float] = {}

    def timed(name: str) -> None:
        method = getattr(Reporter, name)

        def measured(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
                if name == "step":
                    marks.append((time.perf_counter(), dict(spent)))

        setattr(Reporter, name, measured)

    for name in ("step", "status", "evaluated"):
        timed(name)
    work = TrackerThread.run

    def measured_work(worker: TrackerThread) -> None:
        work(worker)
        trackers[worker._tracker] = time.thread_time()

    TrackerThread.run = measured_work

    def at_end() -> None:
        (began, before), (ended, after) = marks[0], marks[-1]
        parts = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        save("recording", {"parts": parts, "wall_s": ended - began, "steps": len(marks) - 1, "trackers": trackers})

    atexit.register(at_end)


def measure_scrapes(service: str) -> None:
    """A scrape is answered by a thread that does nothing else."""
    answer = socketserver.ThreadingMixIn.process_request_thread
    scrapes: list[tuple[float, float]] = []
    began: list[float] = []

    def measured(server: Any, request: Any, address: Any) -> None:
        if not began:
            began.append(time.process_time())
        answer(server, request, address)
        scrapes.append((time.thread_time(), time.process_time()))

    socketserver.ThreadingMixIn.process_request_thread = measured  # type: ignore[method-assign]
    atexit.register(
        lambda: save(
            f"scrapes-{service}",
            {"scrapes": len(scrapes), "cpu_s": sum(cpu for cpu, _ in scrapes), "of_s": scrapes[-1][1] - began[0]},
        )
    )


def measure_panel() -> None:
    from asyncrl.launch import train as launching
    from asyncrl_plugins.viewer.panel.display import RunDisplay
    from asyncrl_plugins.viewer.panel.run_snapshot import RunSnapshot

    class MeasuredDisplay(RunDisplay):
        def __enter__(self) -> RunDisplay:
            self._began = time.perf_counter(), time.process_time()
            super().__enter__()
            return self

        def __exit__(self, *details: object) -> None:
            super().__exit__(*details)
            wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
            save("panel", {"cpu_s": cpu, "wall_s": wall, "is_live": self._live is not None})

    launching.open_display = lambda run_dir, since: MeasuredDisplay(RunSnapshot(run_dir, since))
    for name in ("learner_service", "server_services"):
        setattr(launching, name, _through_here(getattr(launching, name)))


def _through_here(make: Callable[..., Any]) -> Callable[..., Any]:
    """Service started by this file."""

    def made(*arguments: Any, **named: Any) -> Any:
        services = make(*arguments, **named)
        for service in services if isinstance(services, list) else [services]:
            python, _, module, *rest = service.command
            service.command = [python, __file__, f"as-{module}", *rest]
        return services

    return made


def as_service(module: str) -> None:
    """Become the service, with the measurements of this file."""
    from asyncrl.service_entry import run_service

    measure_scrapes(module)
    if module == "learner":
        from learner.__main__ import main

        measure_recording()
    else:
        from rollout_server.__main__ import main
    run_service(module, main)


def as_launcher(config_file: str) -> None:
    from asyncrl.launch.train import train

    measure_panel()
    sys.exit(train(load_config(Path(config_file), []), resume=False))


# --- the run -------------------------------------------------------------------------------------


def run(config: RunConfig, folder: Path) -> None:
    """Run the panel in a terminal of its own, scraped until it ends."""
    file = folder / "config.yaml"
    file.write_text(dump_config(config))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", RESULTS: str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "as-launcher", str(file)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT)
    os.close(theirs)
    threading.Thread(target=_drain, args=(ours, folder / "terminal.log"), daemon=True).start()
    ports = (config.telemetry.learner_port, config.telemetry.rollout_port)
    with _scraped(ports, folder):
        code = process.wait()
    if code:
        sys.exit(f"asyncrl train ended with code {code}:\n{(folder / 'terminal.log').read_text()[-3000:]}")


def _drain(terminal: int, log: Path) -> None:
    with log.open("wb") as file:
        while True:
            try:
                file.write(os.read(terminal, 65536))
            except OSError:  # its other end is closed
                return


class _scraped:
    """A scrape, made by Prometheus or by a thread in its place."""

    def __init__(self, ports: tuple[int, ...], folder: Path):
        self._targets = [f"127.0.0.1:{port}" for port in ports]
        self._folder = folder
        self._prometheus: subprocess.Popen[bytes] | None = None
        self._done = threading.Event()

    def __enter__(self) -> None:
        if not shutil.which("prometheus"):
            threading.Thread(target=self._scrape, daemon=True).start()
            return
        config = {
            "global": {"scrape_interval": f"{SCRAPE_EVERY_S:g}s"},
            "scrape_configs": [{"job_name": "run", "static_configs": [{"targets": self._targets}]}],
        }
        (self._folder / "prometheus.yml").write_text(json.dumps(config))
        self._prometheus = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={self._folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{free_port('127.0.0.1')}",
            ],
            stderr=(self._folder / "prometheus.log").open("wb"),
        )

    def _scrape(self) -> None:
        while not self._done.wait(SCRAPE_EVERY_S):
            for target in self._targets:
                try:
                    urllib.request.urlopen(f"http://{target}/metrics", timeout=5).read()
                except OSError:  # not up yet, or gone
                    continue

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._prometheus:
            self._prometheus.terminate()
            self._prometheus.wait()


# --- the table -----------------------------------------------------------------------------------


def table(folder: Path) -> tuple[str, bool]:
    """Table in Markdown, and whether every target is met."""
    recording, panel = (json.loads((folder / f"{name}.json").read_text()) for name in ("recording", "panel"))
    scrapes = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("scrapes-*.json"))}
    spent = sum(recording["parts"].values())
    cpu, of = (sum(each[key] for each in scrapes.values()) for key in ("cpu_s", "of_s"))
    shares = {
        "recording": (spent, recording["wall_s"], "s of the learner's main thread / s of wall-clock"),
        "panel": (panel["cpu_s"], panel["wall_s"], "CPU s of the launcher / s of wall-clock"),
        "scrapes": (cpu, of, "CPU s of answering threads / CPU s of both services"),
    }
    lines = [
        f"{recording['steps']} steps, {1000 * recording['wall_s'] / recording['steps']:.0f} ms each; "
        f"a {'live panel' if panel['is_live'] else 'display without a terminal'}; "
        f"{', '.join(str(each['scrapes']) + ' scrapes of ' + name[8:] for name, each in scrapes.items())}",
        "",
        "| what | spent | of | share | at most | unit |",
        "|---|---|---|---|---|---|",
    ]
    ratios = {name: part / whole for name, (part, whole, _) in shares.items()}
    for name, (part, whole, unit) in shares.items():
        lines.append(f"| {name} | {part:.3f} | {whole:.1f} | {ratios[name]:.2%} | {TARGETS[name]:.0%} | {unit} |")
    both = ratios["recording and panel"] = ratios["recording"] + ratios["panel"]
    lines.append(f"| recording and panel | | | {both:.2%} | {TARGETS['recording and panel']:.0%} | sum of the shares |")
    per_step = {name: 1000 * seconds / recording["steps"] for name, seconds in recording["parts"].items()}
    lines += ["", "recording, ms per step: " + ", ".join(f"{name} {ms:.2f}" for name, ms in per_step.items())]
    lines += [f"thread of {name}: {seconds:.2f} CPU s" for name, seconds in recording["trackers"].items()]
    lines += [
        f"one scrape of {name[8:]}: {1000 * each['cpu_s'] / each['scrapes']:.1f} ms of CPU"
        for name, each in scrapes.items()
    ]
    return "\n".join(lines), all(ratios[name] <= limit for name, limit in TARGETS.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, help="folder of a demo: its data and its warm start")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    demo: Path = arguments.demo.absolute()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        overrides = [
            *(f"run_dir={folder / 'run'}", f"model.path={demo}/warm_start", f"trainer.max_steps={arguments.steps}"),
            *(f"data.train_files=[{demo}/data/rl.parquet]", f"data.val_files=[{demo}/data/eval.parquet]"),
            *(f"telemetry.{side}_port={free_port('127.0.0.1')}" for side in ("learner", "rollout")),
            *("network.control_port=0", "network.weights_port=0", *arguments.overrides),
        ]
        run(load_config(ROOT / "asyncrl" / "demo" / "grpo.yaml", overrides), folder)
        text, met = table(folder)
    print(text)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("as-"):
        role = sys.argv.pop(1).removeprefix("as-")
        as_launcher(sys.argv[1]) if role == "launcher" else as_service(role)
    else:
        main()
