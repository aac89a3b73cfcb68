"""The page of one run: its head, its health, and all sections."""

from __future__ import annotations

from statistics import median

from asyncrl_plugins.viewer.numbers import count, duration, figure, moment
from asyncrl_plugins.viewer.recorded_run.learning import courses
from asyncrl_plugins.viewer.recorded_run.run import RecordedRun, number, recorded_method_line
from asyncrl_plugins.viewer.report.charts import charts_of_run
from asyncrl_plugins.viewer.report.markup import render
from asyncrl_plugins.viewer.report.sample_cards import sample_cards
from asyncrl_plugins.viewer.report.settings import changed_settings, environment, starts
from asyncrl_plugins.viewer.report.timeline import timeline
from asyncrl_plugins.viewer.report.verdict import all_findings, checks_without_finding, verdict


def page_of(run: RecordedRun) -> str:
    """Build the page of one run."""
    found, groups = all_findings(run), charts_of_run(run)
    tone, sentence = verdict(run, found)
    return render(
        "one_run.html",
        title=run.name,
        titles=["Health", *(title for title, _ in groups), "Timeline", "Samples", "Configuration", "Environment"],
        run=run,
        ending=run.ending or "unknown",
        what=_what(run),
        facts=_facts(run),
        tone=tone,
        sentence=sentence,
        found=found,
        clear=checks_without_finding(run),
        groups=groups,
        lanes=timeline(run),
        samples=sample_cards(run),
        settings=changed_settings(run),
        environment=environment(run),
        starts=starts(run),
    )


def _what(run: RecordedRun) -> str:
    """Describe the run in one line: the model, the algorithm, the mode, and when."""
    parts = [
        str(run.setting("model.path") or "model unknown"),
        _method(run),
        f"{run.setting('trainer.mode')} mode" if run.setting("trainer.mode") else "",
        f"{run.setting('rollout.engine')} engine" if run.setting("rollout.engine") else "",
        f"rollouts with {run.quantization} weights" if run.quantization else "",
        f"began {moment(run.began)}" if run.began else "",
    ]
    return "  ·  ".join(part for part in parts if part)


def _method(run: RecordedRun) -> str:
    """The method in one line; of a configuration that this version does not take, the names of estimator and loss."""
    names = run.setting("algorithm.adv_estimator"), run.setting("algorithm.policy_loss")
    plain = f"{names[0]} advantages, {names[1]} loss" if all(names) else "algorithm unknown"
    return recorded_method_line(run.setting("algorithm")) or plain


def _facts(run: RecordedRun) -> list[tuple[str, str, str]]:
    """List the main figures: name, value, and a note."""
    total, step = number(run.status.get("total_steps")), _step(run)
    tokens = sum(number(step.get("tokens")) or 0.0 for step in run.steps)
    restarts = len(run.starts) - 1
    return [
        *((course.name, course.ends, course.where) for course in courses(run)),
        ("steps", f"{step:,.0f}" + (f" of {total:,.0f}" if total and total != step else ""), "made and recorded"),
        ("duration", duration(run.busy_s), count(restarts, "restart") if restarts > 0 else "of the learner"),
        ("trajectories", figure(float(run.trajectories)), f"{figure(tokens)} sampled tokens"),
        ("time of a step", duration(median(steps) if (steps := run.values("step_s")) else None), "median"),
        ("evaluation", *_cost_of_evaluation(run)),
    ]


def _cost_of_evaluation(run: RecordedRun) -> tuple[str, str]:
    """Return the wall-clock time of all evaluations, and a note on what the learner waited for them."""
    seconds = [s for e in run.evaluations if (s := number(e.get("seconds"))) is not None]
    waited = [s for e in run.evaluations if (s := number(e.get("waited_s"))) is not None]
    if not seconds:
        return "-", "never evaluated" if not run.evaluations else "not recorded"
    return duration(sum(seconds)), f"{count(len(seconds), 'evaluation')}; the learner waited {duration(sum(waited))}"


def _step(run: RecordedRun) -> float:
    return number(run.steps[-1]["step"]) or 0.0 if run.steps else number(run.status.get("step")) or 0.0
