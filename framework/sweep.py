"""The table of a sweep: reads every job's `result.json` and writes `results.csv` and `results.md` beside them.

Hydra calls `ResultsTable` in the parent process when all jobs are over; `python -m framework.sweep DIR` makes the table
again, for a sweep in which a job crashed.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class ResultsTable(Callback):
    """Hydra callback that writes the table of a finished sweep and says on stderr where it is.

    num_failed  jobs of the last sweep of this process that failed: the exit code of the command line
    """

    num_failed: ClassVar[int] = 0

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        rows = write_table(Path(config.hydra.sweep.dir))
        ResultsTable.num_failed = sum(row["status"] != "ok" for row in rows)


def write_table(folder: Path) -> list[dict[str, Any]]:
    """Rows of the table, one a job: its folder, status, metrics and error, and the overrides that led to it."""
    rows = [_row(path) for path in sorted(folder.glob("*/result.json"), key=_job_number)]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, columns)
        writer.writeheader()
        writer.writerows(rows)
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    (folder / "results.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")
    failed = sum(row["status"] != "ok" for row in rows)
    print(f"{len(rows)} jobs, {failed} failed: {folder / 'results.md'}", file=sys.stderr)
    return rows


def _row(path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text(encoding="utf-8"))
    row = {"job": path.parent.name, "overrides": " ".join(result["overrides"]), "status": result["status"]}
    return {**row, **result["metrics"], "error": result["error"] or ""}


def _job_number(path: Path) -> tuple[int, str]:
    name = path.parent.name
    return (int(name) if name.isdigit() else sys.maxsize, name)


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def main(argv: Sequence[str]) -> None:
    """`python -m framework.sweep DIR`. Ends with SystemExit 2 and one line when DIR is missing or no folder."""
    if len(argv) != 1:
        print("usage: python -m framework.sweep DIR (the folder of a sweep)", file=sys.stderr)
        raise SystemExit(2)
    folder = Path(argv[0])
    if not folder.is_dir():
        print(f"error: {folder}: there is no such folder. Name the folder of a sweep", file=sys.stderr)
        raise SystemExit(2)
    write_table(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
