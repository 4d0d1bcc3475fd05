"""One job of a sweep: runs it, writes its `result.json`, says on stderr how it went. An error is a result as well.

The command line calls `run_job` with the work to do. A job that a signal or a kill ends leaves no result, so that
resuming the sweep runs it again.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.errors import FrameworkError, class_and_text
from framework.runs import Incomplete
from framework.runs.engines import KeptWeights
from framework.sweep.files import read_json, write_json

RESULT = "result.json"


@dataclass(frozen=True)
class Place:
    """Where a job stands in its sweep.

    number     from 0, in the order of the sweep
    overrides  its words, `KEY=VALUE` without a `+`
    num_jobs   of the sweep, None where its sweeper decides that on the way
    varied     keys whose values differ between jobs, empty where that is not known
    start      number of the sweep's start that runs it: 0, and one more with every time the sweep is resumed
    """

    folder: Path
    number: int
    overrides: Sequence[str]
    num_jobs: int | None = None
    varied: Sequence[str] = ()
    start: int = 0

    @property
    def title(self) -> str:
        """What tells it from the others."""
        own = [word for word in self.overrides if not self.varied or word.partition("=")[0] in self.varied]
        of = "" if self.num_jobs is None else f" of {self.num_jobs}"
        return f"job {self.number + 1}{of}: {' '.join(own)}"


Work = Callable[[KeptWeights], Mapping[str, float] | None]
_kept = KeptWeights()
"""Of this process: jobs of a launcher with processes of its own have one in each."""


def run_job(place: Place, work: Work, keep: bool = True, wants_trace: bool = False) -> dict[str, float]:
    """The figures of the job: those of an earlier start if it went well, else those that `work` gives now.

    FrameworkError and Incomplete are recorded as errors, and so is whatever else a run raises, with its trace; only
    what ends the whole process passes through.

    keep         whether `work` gets the weights of the job before it, and leaves its own
    wants_trace  users' errors show their trace on stderr as well
    """
    done = finished(place)
    if done is not None:
        print(f"{place.title}: done before", file=sys.stderr)
        return dict(done["metrics"])
    _kept.begin(keep)
    start, found = time.perf_counter(), _outcome(work, wants_trace)
    result = {**_begun(place), **found, "seconds": round(time.perf_counter() - start, 3), **_of_the_engine(_kept)}
    write_json(place.folder / RESULT, result)
    if result["error"] is not None:
        print(f"error: {result['error']}", file=sys.stderr)
    print(f"{place.title}: {_summary(result)}", file=sys.stderr, flush=True)
    return dict(result["metrics"])


def forget_weights() -> None:
    """Gives up what the last job left, when the sweep is over."""
    _kept.begin(keep=False)


def _outcome(work: Work, wants_trace: bool) -> dict[str, Any]:
    """What becomes of the work, as it stands in the result."""
    try:
        return {"status": "ok", **_measured(work(_kept)), "error": None}
    except FrameworkError as error:
        if wants_trace:
            traceback.print_exception(error, file=sys.stderr)
        return {"status": "error", **_measured(None), "error": str(error)}
    except Incomplete as part:
        return {"status": "error", **_measured(part.metrics), "error": str(part)}
    except BrokenPipeError:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        print(trace, end="", file=sys.stderr)
        return {"status": "error", **_measured(None), "error": class_and_text(error), "trace": trace}


def finished(place: Place) -> dict[str, Any] | None:
    """The result of an earlier start that went well with the same words, None when there is none."""
    path = place.folder / RESULT
    if not path.exists():
        return None
    result = read_json(path)
    return result if result.get("status") == "ok" and result.get("overrides") == list(place.overrides) else None


def _begun(place: Place) -> dict[str, Any]:
    from framework.runs.bench.report import versions

    return {
        "overrides": list(place.overrides),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "start": place.start,
        "versions": versions(),
    }


def _measured(metrics: Mapping[str, float] | None) -> dict[str, Any]:
    return {"metrics": dict(metrics or {}), "units": dict(getattr(metrics, "units", {}))}


def _of_the_engine(kept: KeptWeights) -> dict[str, Any]:
    """weights: `kept` or `loaded`; null where the job opened no engine."""
    weights = None if kept.facts is None else "kept" if kept.were_kept else "loaded"
    return {"weights": weights, "engine": kept.facts}


def _summary(result: Mapping[str, Any]) -> str:
    words = [f"{result['status']} in {result['seconds']:.1f} s"]
    if result["weights"] is not None:
        words.append(f"weights {result['weights']}")
    words += [f"{name} {value:.4g}" for name, value in list(result["metrics"].items())[:3]]
    return ", ".join(words)
