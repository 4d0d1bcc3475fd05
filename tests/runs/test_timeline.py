"""`run=timeline` draws a trace as one page that needs nothing else, and what it shows is what happened."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from framework import LLM, SamplingParams
from framework.config import Config
from framework.errors import ConfigError
from framework.runs import RunArgs
from framework.runs.timeline import AGAIN, DECODE, PREFILL, run
from framework.testing.crafted import save_crafted

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=4", "kv_cache.block_size=4")
LONG = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, detokenize=False)
EVIL = "</script><b>"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Chunks, a preemption, two completions of one prompt, an abort, and an id that tries to end the page's script."""
    folder = tmp_path_factory.mktemp("timeline")
    model = save_crafted(folder / "m", 8.0 * torch.eye(24).roll(1, 1))
    words = (*SMALL, "scheduler.max_num_batched_tokens=6", "kv_cache.num_blocks=8", f"trace={folder}/t.jsonl")
    with LLM(model, overrides=words) as llm:
        llm.generate([[4, 5, 6, 7, 8, 9, 10], [8, 9, 10, 11]], LONG)
        llm.generate([[5, 6, 7]], LONG.replace(n=2, max_tokens=2))
        llm.engine.add_request(EVIL, [4], LONG)
        llm.engine.step()
        llm.engine.abort(EVIL)
    return folder / "t.jsonl"


@pytest.fixture
def drawn(trace, tmp_path, capsys):
    """(text of the page, what it shows)."""
    figures = run(Config(trace=str(trace)), RunArgs(output=f"{tmp_path}/t.html"))
    text = (tmp_path / "t.html").read_text(encoding="utf-8")
    line = next(x for x in text.splitlines() if x.startswith("const D = "))
    shown = json.loads(line.removeprefix("const D = ").removesuffix(";"))
    assert (
        capsys.readouterr().out == f"{tmp_path}/t.html: {len(shown['steps'])} steps of {len(shown['lanes'])} requests\n"
    )
    assert figures == {"steps": len(shown["steps"]), "requests": len(shown["lanes"])}
    return text, shown


def test_lane_tells_when_a_request_ran_and_what_it_computed(drawn, trace):
    _, shown = drawn
    first, second, *others = shown["lanes"]
    assert [lane["id"] for lane in (first, second, *others)] == ["0", "1", "2", "2/1", EVIL]
    assert first["spans"][:3] == [[0, PREFILL, 6, 0], [1, PREFILL, 1, 6], [2, DECODE, 1, 7]]
    assert (first["prompt"], first["output"], first["end"][1]) == (7, 14, "length")
    preempted = [mark for mark in second["marks"] if mark[1] == "preempted"]
    assert preempted and AGAIN in {span[1] for span in second["spans"]} and second["output"] == 14
    assert others[2]["end"][1] == "abort"
    assert [lane["output"] for lane in others[:2]] == [2, 2]


def test_step_tells_tokens_rows_blocks_and_seconds(drawn, trace):
    _, shown = drawn
    lines = [x for x in map(json.loads, trace.read_text().splitlines()) if "step" in x]
    assert len(lines) == len(shown["steps"])
    for line, step in zip(lines, shown["steps"], strict=True):
        number, begin, end, prompt, others, rows, _, used, preempted, parts = step
        assert (number, end, rows, preempted) == (line["step"], line["t"], len(line["rows"]), len(line["preempted"]))
        assert begin <= end and prompt + others == sum(row[2] for row in line["rows"])
        assert used == line["counts"]["num_blocks"] - 1 - line["counts"]["num_free_blocks"]
        assert sum(parts) == pytest.approx(sum(line["seconds"].values()))
    begins = [step[1] for step in shown["steps"]]
    assert begins == sorted(begins)


def test_page_needs_nothing_else_and_an_id_ends_no_script(drawn):
    text, _ = drawn
    assert text.count("</script>") == 1 and EVIL not in text
    for outside in ("http:", "https:", "src=", "@import", "url(", "<link"):
        assert outside not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_draws_reads_and_zooms_in_a_browser(trace, tmp_path, scheme):
    api = pytest.importorskip("playwright.sync_api")
    if (browser := shutil.which("chromium")) is None:
        pytest.skip("needs chromium")
    run(Config(trace=str(trace)), RunArgs(output=f"{tmp_path}/t.html"))
    flags = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run")  # fmt: skip
    errors = []
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=list(flags))
        page = chromium.new_context(color_scheme=scheme).new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"file://{tmp_path}/t.html")
        page.wait_for_function("() => !queued")
        page.click("#axis")
        assert page.evaluate("[x0, x1]") == [0, page.evaluate("S.length")]
        box = page.locator("#rows").bounding_box()
        page.mouse.move(box["x"] + 140, box["y"] + 12)
        page.wait_for_selector("#tip b")
        assert page.locator("#tip b").inner_text() == "request 0"
        assert "prefill, 6 tokens from 0" in page.locator("#tip").inner_text()
        before = page.evaluate("x1 - x0")
        page.focus("#rows")
        page.keyboard.press("+")
        assert page.evaluate("x1 - x0") == pytest.approx(0.6 * before)
        page.keyboard.press("0")
        painted = "() => new Set($('rows').getContext('2d').getImageData(0, 0, $('rows').width, 60).data).size"
        page.wait_for_function("() => !queued")
        assert page.evaluate(painted) > 10
        chromium.close()
    assert errors == []


def test_trace_of_the_first_format_is_drawn(trace, tmp_path):
    first = {"trace": 1, "time": 0.0}
    request = {"request": "a", "t": 0.0, "num_prompt_tokens": 2, "max_total_tokens": 4, "priority": 0, "seed": 1}
    step = {"step": 0, "t": 0.1, "rows": [["a", 0, 2, 0, True]], "admitted": [{"id": "a", "hit_tokens": 0}],
            "preempted": [], "aborted": [], "tokens": {"a": [5]}, "finished": {"a": "stop"}, "new_blocks": 1,
            "counts": {"num_blocks": 9, "num_free_blocks": 7}, "seconds": {"forward": 0.02}}  # fmt: skip
    path = tmp_path / "old.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in (first, request, step)))
    figures = run(Config(trace=str(path)), RunArgs(output=f"{tmp_path}/old.html"))
    assert figures == {"steps": 1, "requests": 1}


def test_what_cannot_be_drawn_is_refused_by_name(trace, tmp_path):
    with pytest.raises(ConfigError, match=r"run=timeline needs a trace to draw\. Name one: trace=FILE"):
        run(Config(), RunArgs(output="t.html"))
    with pytest.raises(ConfigError, match=r"run=timeline writes a page\. Name it: output=FILE\.html$"):
        run(Config(trace=str(trace)), RunArgs())
    with pytest.raises(ConfigError, match=r"Name it: output=FILE\.html, not output=t\.json"):
        run(Config(trace=str(trace)), RunArgs(output="t.json"))
    with pytest.raises(ConfigError, match=r"output=.*/no/t\.html: No such file or directory\. Name a file in a folder"):
        run(Config(trace=str(trace)), RunArgs(output=f"{tmp_path}/no/t.html"))
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(trace.read_bytes()[:-20])
    number = trace.read_bytes().count(b"\n")
    with pytest.raises(ConfigError, match=rf"trace=.*cut\.jsonl: line {number} is cut off"):
        run(Config(trace=str(cut)), RunArgs(output=f"{tmp_path}/t.html"))


def test_line_that_names_nobody_is_refused_with_its_number(trace, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(line for line in trace.read_text().splitlines(keepends=True) if '"request"' not in line))
    with pytest.raises(ConfigError, match=r"trace=.*t\.jsonl: line 2 cannot be read: KeyError: '0'"):
        run(Config(trace=str(path)), RunArgs(output=f"{tmp_path}/t.html"))


def test_jobs_of_a_sweep_read_one_trace_and_write_a_page_each(trace, tmp_path):
    words = ["timeline", "--multirun", "engine.seed=1,2", f"trace={trace}", "output=t.html", "hydra.sweep.dir=s"]
    done = subprocess.run([sys.executable, "-m", "framework", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = sorted(path.relative_to(tmp_path / "s").as_posix() for path in (tmp_path / "s").rglob("*.html"))
    assert pages == ["0/t.html", "1/t.html"]
