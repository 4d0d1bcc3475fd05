"""The end of a sweep: `results.csv`, a line a job; `results.md`, a line a combination; `results.png`.

Hydra's callback and `python -m framework.sweep` call `write_results`; it reads nothing but the folder.
"""

from __future__ import annotations

import csv
import io
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from framework.sweep.files import read_json, write_text
from framework.sweep.lock import LOCK
from framework.sweep.picture import write_picture
from framework.sweep.results import Job, Results

NO_MATPLOTLIB = (
    "no results.png: matplotlib is not installed. pip install 'framework[sweep]', then python -m framework.sweep {}"
)


def write_results(folder: Path) -> int:
    """Writes the three files, says on stderr where they are; the number of jobs that failed.

    No picture is made, and that is said, without matplotlib or where no job has a figure. ConfigError for a result
    that cannot be read.
    """
    results = Results.read(folder)
    write_text(folder / "results.csv", _csv(results.jobs))
    write_text(folder / "results.md", "\n".join(_page(folder, results)) + "\n")
    num_failed = sum(job.status != "ok" for job in results.jobs)
    print(f"{len(results.jobs)} jobs, {num_failed} failed: {folder / 'results.md'}", file=sys.stderr)
    if missing := _missing(folder, results):
        print(missing, file=sys.stderr)
    try:
        if not write_picture(folder / "results.png", results):
            print("no results.png: no job has figures", file=sys.stderr)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print(NO_MATPLOTLIB.format(folder), file=sys.stderr)
    return num_failed


def _missing(folder: Path, results: Results) -> str:
    """What is to be said of a sweep that has not come to its end, else an empty text."""
    num_jobs = read_json(folder / LOCK)["num_jobs"] if (folder / LOCK).exists() else None
    num_missing = (num_jobs or 0) - len(results.jobs)
    if num_missing <= 0:
        return ""
    return f"{num_missing} of {num_jobs} jobs have no result yet: python -m framework.sweep --resume {folder}"


def _csv(jobs: Sequence[Job]) -> str:
    rows = [_row(job) for job in jobs]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _row(job: Job) -> dict[str, Any]:
    words = " ".join(f"{key}={value}" for key, value in job.words.items())
    took = {"job_seconds": job.seconds, "weights": job.weights}  # runs have figures that are called seconds
    return {"job": job.name, "overrides": words, "status": job.status, **took, **job.metrics, "error": job.error or ""}


# ------------------------------------------------------------------------------------------------------------ page


def _page(folder: Path, results: Results) -> list[str]:
    num_failed = sum(job.status != "ok" for job in results.jobs)
    lines = [f"# {len(results.jobs)} jobs, {num_failed} failed", "", *_about(folder, results)]
    lines += ["## Figures", "", *_figures(results)]
    if any(job.repetition is not None for job in results.jobs) and len(results.combinations) > 1:
        lines += ["## Differences", "", *_differences(results)]
    return [*lines, "## Jobs", "", *_jobs(results)]


def _about(folder: Path, results: Results) -> list[str]:
    lines = []
    if (folder / LOCK).exists():
        argv = read_json(folder / LOCK)["argv"]
        lines += [f"`{shlex.join(['python', '-m', 'framework', *argv])}`", ""]
    if missing := _missing(folder, results):
        lines += [missing, ""]
    if results.common:
        lines += ["The same in all jobs: " + ", ".join(f"`{word}`" for word in results.common), ""]
    return lines


def _figures(results: Results) -> list[str]:
    """A line a combination: means over the repetitions, with their 95 % confidence intervals."""
    if not results.figures:
        return ["No job has figures.", ""]
    named = [f"{name}, {results.units[name]}" if name in results.units else name for name in results.figures]
    front = results.front
    rows: list[Iterable[object]] = [[*results.varied, "n", *named, *(["front"] if front else [])]]
    for one in results.combinations:
        means = [one.mean(name) for name in results.figures]
        n = max((mean.n for mean in means if mean is not None), default=0)
        rows.append([*one.words.values(), n, *means, *(["yes" if one in front else ""] if front else [])])
    lines = _table(rows)
    said = "n jobs of a combination went well."
    if any(len(one.jobs) > 1 for one in results.combinations):
        said += " ± is the half width of the 95 % confidence interval of the mean (Student's t over n)."
    if front:
        said += f" front: no other combination has both more {results.throughput} and less {results.latencies[0]}."
    return [*lines, "", said, ""]


def _differences(results: Results) -> list[str]:
    """Each combination against the first that has figures, repetition by repetition, since those have equal seeds."""
    shown = [name for name in (results.throughput, *results.latencies) if name is not None] or results.figures
    first = next((one for one in results.combinations if any(map(one.mean, shown))), results.combinations[0])
    rows: list[Iterable[object]] = [[*results.varied, "n", *shown]]
    for one in results.combinations:
        if one is first:
            continue
        gains = [one.gain_on(first, name) for name in shown]
        n = max((gain.n for gain in gains if gain is not None), default=0)
        rows.append([*one.words.values(), n, *(None if gain is None else f"{gain} %" for gain in gains)])
    base = ", ".join(f"`{key}={value}`" for key, value in first.words.items())
    return [*_table(rows), "", f"Against {base}, in pairs of equal seeds; n pairs, 95 % confidence intervals.", ""]


def _jobs(results: Results) -> list[str]:
    repeated = any(job.repetition is not None for job in results.jobs)
    keys = [*results.varied, *(["repetition"] if repeated else [])]
    rows: list[Iterable[object]] = [["job", *keys, "status", "seconds", "weights", "error"]]
    for job in results.jobs:
        words = [job.words.get(key) for key in results.varied] + ([job.repetition] if repeated else [])
        rows.append([job.name, *words, job.status, job.seconds, job.weights, job.error])
    return _table(rows)


def _table(rows: Sequence[Iterable[object]]) -> list[str]:
    cells = [[_cell(value) for value in row] for row in rows]
    cells.insert(1, ["---"] * len(cells[0]))
    return [f"| {' | '.join(row)} |" for row in cells]


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
