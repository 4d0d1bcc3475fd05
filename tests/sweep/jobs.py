"""Words of short jobs, and results as the jobs of a sweep leave them."""

import json

SMALL = ("engine.dtype=float32", "kv_cache.num_blocks=32", "scheduler.max_num_seqs=4")
BENCH = ("bench.num_prompts=2", "bench.input_len=8", "bench.output_len=4", "run.warmup=0", "run.rounds=1")


def write_job(folder, number, words, metrics=None, error=None, units=None):
    job = folder / str(number)
    job.mkdir(parents=True)
    status = "ok" if error is None else "error"
    result = {"overrides": words.split(), "status": status, "metrics": metrics or {}, "units": units or {}}
    (job / "result.json").write_text(json.dumps({**result, "error": error, "seconds": 1.5, "weights": "kept"}))


def results_of(folder):
    """Results of all jobs, in their order."""
    paths = sorted(folder.glob("*/result.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text()) for path in paths]
