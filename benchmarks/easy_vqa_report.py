"""Page and table of the easy-VQA study, from the records of `python -m benchmarks.easy_vqa`.

    python -m benchmarks.easy_vqa_report [RUNS]

With RUNS its records become those of benchmarks/measured/easy_vqa.jsonl. Writes docs/lab-log/easy-vqa.md,
docs/images/easy-vqa.png, and the table between two marks in docs/results.md.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from PIL import Image, ImageDraw

from asyncrl_plugins.demos.easy_vqa import pictures
from benchmarks.easy_vqa import RECORDS, ROOT, read_records

MEASURED = ROOT / "benchmarks" / "measured" / "easy_vqa.jsonl"
PAGE, RESULTS, SHEET = (ROOT / "docs" / name for name in ("lab-log/easy-vqa.md", "results.md", "images/easy-vqa.png"))
BEGIN, END = "<!-- easy-vqa: begin -->", "<!-- easy-vqa: end -->"
ARMS = {
    "majority": "majority answer of the question's text, blind",
    "start": "start",
    "grpo": "GRPO",
    "sft": "SFT, as many CPU seconds",
    "blind": "GRPO without pictures",
    "digits": "GRPO with the digits' settings",
}
SEEDS = (1, 2, 3)
SHOWN = 8
SIDE = 96
"""Pixels of a picture on the sheet."""

Records = Sequence[Mapping[str, Any]]


def pieces(records: Records, arm: str, piece: str) -> list[Mapping[str, Any]]:
    """Records of an arm, by seed."""
    found = [each for each in records if (each["arm"], each["piece"]) == (arm, piece)]
    return sorted((each for each in found if not each["cell"].startswith("sft-of-")), key=lambda each: each["seed"])


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard deviation over seeds (their number); of one the value alone."""
    if not values:
        return "not made"
    if len(values) == 1:
        return f"{values[0]:.{digits}f} (1)"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f} ({len(values)})"


def standard_error(share: float, rows: int) -> float:
    return sqrt(share * (1 - share) / rows)


def table(records: Records) -> str:
    """Scores of the arms that have some."""
    lines = ["| | whole test split | 200 balanced questions | CPU seconds |", "|---|---|---|---|"]
    for arm, name in ARMS.items():
        test, balanced = ([each["accuracy"] for each in pieces(records, arm, rows)] for rows in ("test", "balanced"))
        if not test and not balanced:
            continue
        cost = [each["cpu_s"] for each in pieces(records, arm, "train")]
        once = arm in ("majority", "start")
        shown = [f"{values[0]:.3f}" if once and values else spread(values) for values in (test, balanced)]
        lines.append(f"| {name} | {shown[0]} | {shown[1]} | {'' if once else spread(cost, 0)} |")
    return "\n".join(lines)


def verdict(records: Records) -> str:
    """Gain of GRPO over supervised training, whichever way it comes out."""
    for piece, rows in (("test", "on the whole test split"), ("balanced", "on the 200 balanced questions")):
        by_arm = {arm: {each["seed"]: each for each in pieces(records, arm, piece)} for arm in ("grpo", "sft")}
        if seeds := sorted(by_arm["grpo"].keys() & by_arm["sft"].keys()):
            gains = [by_arm["grpo"][seed]["accuracy"] - by_arm["sft"][seed]["accuracy"] for seed in seeds]
            if len(gains) > 1:
                error, of = stdev(gains) / sqrt(len(gains)), f"mean of {len(gains)} seeds ± standard error"
            else:
                both = [by_arm[arm][seeds[0]] for arm in by_arm]
                error = sqrt(sum(standard_error(each["accuracy"], each["rows"]) ** 2 for each in both))
                of = f"seed {seeds[0]} alone ± standard error of the questions"
            gain = mean(gains)
            said = (
                "GRPO gains over supervised training of the same cost"
                if gain > 2 * error
                else "supervised training of the same cost is better than GRPO"
                if gain < -2 * error
                else "GRPO and supervised training of the same cost are not told apart"
            )
            return f"**{said}**: {gain:+.4f} ± {error:.4f} {rows} ({of})."
    return "**What GRPO gains over supervised training of the same cost is not measured yet.**"


def missing(records: Records) -> list[str]:
    """Runs, and scores on the test split, that the whole study has and these records have not: a text for each arm."""
    there = {(each["arm"], each["seed"], each["piece"]) for each in records}
    left = (
        [] if any((arm, piece) == ("start", "test") for arm, _, piece in there) else [f"{ARMS['start']} (test split)"]
    )
    for arm in ("grpo", "sft", "blind", "digits"):
        seeds = {piece: [seed for seed in SEEDS if (arm, seed, piece) not in there] for piece in ("train", "test")}
        names = {"train": "runs of seeds", "test": "test split of seeds"}
        what = [f"{names[piece]} {', '.join(map(str, some))}" for piece, some in seeds.items() if some]
        left += [f"{ARMS[arm]} ({'; '.join(what)})"] if what else []
    return left


def page(records: Records) -> str:
    """The page of the lab log."""
    return "\n\n".join(_sections(records)) + "\n"


def _sections(records: Records) -> Iterator[str]:
    days = sorted({each["date"] for each in records})
    hosts = sorted({f"{each['cores']} cores of an {each['cpu']}" for each in records})
    versions = sorted({f"torch {each['torch']}, transformers {each['transformers']}" for each in records})
    yield f"""# easy-VQA: the demo of pictures beside its baselines

`python -m benchmarks.easy_vqa RUNS`, then `python -m benchmarks.easy_vqa_report RUNS`, which has written this page from
`benchmarks/measured/easy_vqa.jsonl`. {"; ".join(hosts)}, shared with other work; {"; ".join(versions)};
float32; {" to ".join(dict.fromkeys((days[0], days[-1])))}.

SmolLM2-135M with a vision tower of 0.2 M parameters ([plug-in](../../asyncrl_plugins/demos/README.md)). All arms begin
with the start that ships. The test split is the published one: 9,673 questions about 1,000 pictures that no training
shows. The balanced questions are 200 of them, with yes and no equally often in each kind. Decoding is greedy, by the
policy itself. ± is the standard deviation over seeds, whose number stands behind."""
    yield table(records)
    yield verdict(records)
    if left := missing(records):
        yield f"**Not made yet**: {'; '.join(left)}. The command goes on from there."
    yield _arms(records)
    yield from filter(None, (_by_kind(records), _curves(records), _shown(records)))


def _arms(records: Records) -> str:
    steps = [each["steps"] for each in pieces(records, "sft", "train")]
    said = f"{min(steps)} to {max(steps)} steps" if steps else "steps"
    return f"""**Arms.** GRPO: LoRA of rank 16, 60 steps of 16 prompts and 4 completions, learning rate 1e-4. SFT: from
the same start, on the right completions (`not red? blue. Answer: yes`) of the same training rows in the same order,
{said} of 16 rows, learning rate 5e-4 falling to 1.5e-4. The number of steps is chosen so that the run takes the CPU
seconds of that seed's GRPO. A demonstration tells more than a reward: it has what the picture shows, too. GRPO without
pictures: the same rows as text alone. Digits' settings: those of `asyncrl demo digits`, all weights, 15 steps of 32
prompts and 8 completions, staleness 2, which is as many completions. The blind majority is that of the benchmark's
training questions, on the balanced questions that of the balanced training rows. CPU seconds are those of all processes
of a run, with loading, export, and of GRPO one evaluation of 200 rows at its end."""


def _by_kind(records: Records) -> str:
    """Share of right answers by kind of question: on the test split, or where that is missing on the balanced rows."""
    piece = "test" if pieces(records, "grpo", "test") or pieces(records, "start", "test") else "balanced"
    by_arm = {arm: pieces(records, arm, piece) for arm in ARMS}
    shown = [arm for arm, found in by_arm.items() if found]
    if shown == ["majority"]:
        return ""
    where = "on the whole test split" if piece == "test" else "on the 200 balanced questions"
    lines = [f"**By kind of question**, {where}, mean over seeds:", ""]
    lines += [f"| kind | rows | {' | '.join(ARMS[arm] for arm in shown)} |", "|---" * (len(shown) + 2) + "|"]
    for kind, (rows, _) in by_arm[shown[0]][0]["by_kind"].items():
        shares = (mean(each["by_kind"][kind][1] for each in by_arm[arm]) for arm in shown)
        lines.append(f"| {kind} | {rows} | {' | '.join(f'{share:.3f}' for share in shares)} |")
    return "\n".join(lines)


def _curves(records: Records) -> str:
    runs = [each for arm in ("grpo", "blind", "digits") for each in pieces(records, arm, "train")]
    if not runs:
        return ""
    halfway = {each["seed"]: each["accuracy"] for each in pieces(records, "grpo", "halfway")}
    lines = ["**Reward in training** (temperature 1), means of ten steps:", ""]
    lines += ["| run | steps | reward | balanced questions after 30 steps | CPU s |", "|---|---|---|---|---|"]
    for run in runs:
        middle = f"{halfway[run['seed']]:.3f}" if run["arm"] == "grpo" and run["seed"] in halfway else ""
        rewards = ", ".join(f"{value:.2f}" for value in run["reward"])
        lines.append(
            f"| {ARMS[run['arm']]}, seed {run['seed']} | {run['steps']} | {rewards} | {middle} | {run['cpu_s']:.0f} |"
        )
    return "\n".join(lines)


def _shown(records: Records) -> str:
    """Completions about the pictures of the sheet, by the first seed of each arm."""
    wrote = {arm: found[0]["wrote"] for arm in ("start", "grpo", "sft") if (found := pieces(records, arm, "balanced"))}
    if not wrote:
        return ""
    lines = ["**What they write** about the first of the balanced questions; wrong answers in italics:", ""]
    lines += ["![eight pictures of one shape each](../images/easy-vqa.png)", ""]
    lines += [f"| | question | {' | '.join(ARMS[arm] for arm in wrote)} |", "|---" * (len(wrote) + 2) + "|"]
    for number, rows in enumerate(zip(*(each[:SHOWN] for each in wrote.values()), strict=True), 1):
        said = (f"`{row['completion']}`" if row["right"] else f"*{row['completion']}*" for row in rows)
        lines.append(f"| {number} | {rows[0]['question']} | {' | '.join(said)} |")
    return "\n".join(lines)


def sheet(records: Records) -> Image.Image | None:
    """The pictures that the page shows, in a row with their numbers."""
    scored = next((each for each in records if each["piece"] == "balanced" and "wrote" in each), None)
    if scored is None:
        return None
    files = pictures("test")
    made = Image.new("RGB", (SHOWN * (SIDE + 8), SIDE + 22), "white")
    draw = ImageDraw.Draw(made)
    for place, row in enumerate(scored["wrote"][:SHOWN]):
        picture = Image.open(io.BytesIO(files[row["picture"]])).convert("RGB").resize((SIDE, SIDE))
        made.paste(picture, (place * (SIDE + 8) + 4, 18))
        draw.text((place * (SIDE + 8) + 4, 4), str(place + 1), fill="black")
    return made


def with_table(results: str, records: Records) -> str:
    """The page of results with the table in its place."""
    note = "\n\nPieces that are not made yet are listed in the log." if missing(records) else ""
    block = f"{BEGIN}\n{table(records)}\n\n{verdict(records)}{note}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, results, flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", metavar="RUNS")
    arguments = parser.parse_args()
    if arguments.runs:
        shutil.copyfile(arguments.runs / RECORDS, MEASURED)
    records = read_records(MEASURED)
    PAGE.write_text(page(records), encoding="utf-8")
    RESULTS.write_text(with_table(RESULTS.read_text(encoding="utf-8"), records), encoding="utf-8")
    if made := sheet(records):
        made.quantize(64).save(SHEET, optimize=True)
    print(table(records), verdict(records), *missing(records), sep="\n")


if __name__ == "__main__":
    main()
