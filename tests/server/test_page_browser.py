"""The page in a real Chromium, against a server of its own: what a person does with it, by mouse and by keyboard."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
playwright = pytest.importorskip("playwright.sync_api")

from framework.testing.served import Served  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is found")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip
TIMEOUT_MS = 60_000  # nothing comes near it: it turns a hang into a failure
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
PROMPT = "Count from one to ten."
SHIFTS = """
window.shift = 0;
new PerformanceObserver((list) => { for (const one of list.getEntries()) window.shift += one.value; })
  .observe({ type: "layout-shift" });
"""
HIDE = """(isHidden) => {
  Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture(scope="module")
def server():
    with Served("scheduler.max_num_seqs=4", "engine.max_model_len=512") as made:
        yield made


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        made = p.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield made
        made.close()


@contextmanager
def opened(browser, server, *, allowed=(), **options):
    """A page that has loaded. It must complain of nothing, and ask nobody but its server."""
    context = browser.new_context(**{"viewport": WIDE, **options})
    context.set_default_timeout(TIMEOUT_MS)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(server.url)
        page.wait_for_selector("#link[data-state=live]")
        yield page
        assert [text for text in said if not any(word in text for word in allowed)] == []
        assert [url for url in asked if not url.startswith((f"{server.url}/", "data:"))] == []
    finally:
        context.close()


@pytest.fixture
def page(browser, server):
    with opened(browser, server) as made:
        yield made


def fill(page, **values):
    for name, value in values.items():
        page.fill(f"#p-{name}", str(value))


def ask(page, text=PROMPT):
    """Sends a text by the keyboard: the body of the request."""
    page.fill("#prompt", text)
    with page.expect_request(re.compile("/v1/")) as sent:
        page.press("#prompt", "Enter")
    return sent.value.post_data_json


def answer(page):
    """The text of the last answer once it is whole."""
    page.wait_for_selector("#stop[disabled]", state="attached")
    return page.locator(".message.assistant .text").last.text_content()


def note(page):
    return page.locator(".note").last.text_content()


def test_chat_is_streamed_token_by_token(page):
    fill(page, max_tokens=16, temperature=0)
    page.evaluate("""() => {
        window.lengths = [];
        new MutationObserver(() => window.lengths.push(document.querySelectorAll(".token").length))
          .observe(document.getElementById("transcript"), { childList: true, subtree: true });
    }""")
    ask(page)
    text = answer(page)
    assert len(text) > 10
    seen = page.evaluate("[...new Set(window.lengths)].filter((n) => n)")
    assert len(seen) > 5 and seen[0] < seen[-1] == 16
    assert re.search(r"\d+ prompt.*16 output tokens.*TTFT .*TPOT .*tokens/s.*finish: length", note(page))


def test_changed_parameter_is_sent_and_empty_ones_are_not(page):
    fill(page, max_tokens=4, temperature=0, seed=2**60 + 1, stop="\\n\nzebra", stop_token_ids="7, 8")
    page.select_option("#p-ignore_eos", "true")
    page.select_option("#p-stages\\.top_k", "false")
    body = ask(page)
    answer(page)
    assert body == {
        "model": body["model"], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4,
        "temperature": 0, "seed": 2**60 + 1, "stop": ["\n", "zebra"], "stop_token_ids": [7, 8], "ignore_eos": True,
        "logprobs": True, "top_logprobs": 5, "stages": {"top_k": False},
        "messages": [{"role": "user", "content": PROMPT}],
    }  # fmt: skip
    assert page.locator(".message .error").count() == 0


def test_cleared_chat_is_forgotten_also_while_an_answer_comes(page):
    fill(page, max_tokens=400, temperature=0)
    page.select_option("#p-ignore_eos", "true")
    ask(page, "One")
    page.wait_for_selector(".token")
    page.click("#clear")
    page.wait_for_selector("#stop[disabled]", state="attached")
    assert page.input_value("#prompt") == "" and page.locator(".message").count() == 0
    fill(page, max_tokens=4)
    assert [m["content"] for m in ask(page, "Two")["messages"]] == ["Two"]
    answer(page)


@pytest.mark.parametrize("n", ["0", "-1", "100000000"])
def test_number_of_completions_that_is_refused_is_an_error_beside_the_answer(browser, server, n):
    with opened(browser, server, allowed=["400"]) as page:
        fill(page, n=n)
        ask(page)
        page.wait_for_selector(".message .error")
        assert page.input_value("#prompt") == PROMPT


def test_ended_requests_of_a_server_are_forgotten_when_another_one_answers(page):
    ended = """(numbers) => {
        const view = new LiveView(16), one = (number) => ({ number, time: 1, ttft_s: 1, tpot_s: 1 });
        view.hear("history", { ended: [one(90), one(91)] });
        view.gap();
        view.hear("history", { ended: numbers.map(one) });
        return [...view.ended.keys()];
    }"""
    assert page.evaluate(ended, [1, 2]) == [1, 2]
    assert page.evaluate(ended, [*range(5000)]) == [*range(4000, 5000)]


def test_chat_goes_on_with_what_was_said(page):
    fill(page, max_tokens=4, temperature=0)
    page.fill("#system", "Be brief.")
    ask(page, "One")
    first = answer(page)
    body = ask(page, "Two")
    answer(page)
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == first


def test_completions_are_side_by_side(page):
    page.check("[name=mode][value=completion]", force=True)
    fill(page, max_tokens=4, n=2, seed=1)
    body = ask(page, "The sea is")
    answer(page)
    assert body["prompt"] == "The sea is" and body["logprobs"] == 5
    texts = page.locator(".message.assistant .text").all_text_contents()
    assert len(texts) == 2 and all(texts)


def test_prompt_logprobs_show_the_tokens_of_the_prompt(page):
    fill(page, max_tokens=1, prompt_logprobs=1)
    ask(page)
    answer(page)
    page.click(".prompt-tokens summary")
    assert PROMPT in page.locator(".prompt-tokens .text").text_content()


def test_token_tells_its_probability_and_its_alternatives_to_mouse_and_keyboard(page):
    fill(page, max_tokens=6, temperature=0)
    ask(page)
    answer(page)
    page.locator(".token").nth(2).hover()
    rows = page.locator("#popover .alternative")
    assert rows.count() == 5
    shares = [float(text.removesuffix(" %")) for text in page.locator("#popover .num").all_text_contents()]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.5
    assert rows.nth(0).get_attribute("class") == "alternative chosen"
    page.mouse.move(5, 5)
    assert not page.is_visible("#popover")
    page.locator(".message.assistant .text").focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.is_visible("#popover") and page.locator(".token.current").get_attribute("data-at") == "3"


def test_escape_stops_the_answer_and_its_request(page):
    fill(page, max_tokens=400, temperature=0)
    page.select_option("#p-ignore_eos", "true")
    ask(page)
    page.locator(".token").nth(2).wait_for()
    page.keyboard.press("Escape")
    answer(page)
    assert "stopped" in note(page)
    playwright.expect(page.locator("#link-text")).to_have_text("idle", timeout=TIMEOUT_MS)


def test_refusal_is_shown_where_it_happened(browser, server):
    with opened(browser, server, allowed=["status of 400"]) as page:
        fill(page, temperature=-1)
        ask(page)
        page.wait_for_selector(".message .error")
        assert "temperature" in page.text_content(".message [role=alert]")
        assert page.get_attribute("#p-temperature", "aria-invalid") == "true"
        assert page.input_value("#prompt") == PROMPT
        fill(page, temperature=0, max_tokens=2)
        assert page.get_attribute("#p-temperature", "aria-invalid") == "false"


def test_value_that_cannot_be_read_is_not_sent(page):
    fill(page, top_k="many")
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    assert page.text_content("#p-top_k-wrong") == "a whole number is needed"
    assert page.locator(".message").count() == 0
    assert page.evaluate("document.activeElement.id") == "p-top_k"


def test_live_numbers_move_with_a_request_and_come_to_rest(page):
    fill(page, max_tokens=60, temperature=0)
    page.select_option("#p-ignore_eos", "true")
    ask(page)
    page.click("#tab-live")
    page.wait_for_selector("#batch .phase-decode")
    cells = page.locator("#batch tbody tr").first.locator("td")
    first = cells.nth(4).text_content()
    playwright.expect(cells.nth(4)).not_to_have_text(first, timeout=TIMEOUT_MS)
    assert int(cells.nth(4).text_content()) > int(first)
    assert page.locator("#tiles dd").nth(0).text_content() == "1"
    assert cells.nth(0).text_content().startswith("chatcmpl-")
    page.wait_for_selector("#idle", state="visible")
    tiles = dict(
        zip(page.locator("#tiles dt").all_text_contents(), page.locator("#tiles dd").all_text_contents(), strict=True)
    )
    assert tiles["Running"] == "0" and re.match(r"[\d.]+(s|ms)", tiles["TTFT, median"])
    used, free = (int(page.text_content(f"#pool-{state}").replace(",", "")) for state in ("used", "free"))
    assert used == 0 and free > 0
    assert page.locator(".chart circle").count() >= 2
    assert "M" in page.locator(".chart path").first.get_attribute("d")


def test_hidden_page_listens_to_nothing_and_comes_back(page):
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/live/events")):
        page.evaluate(HIDE, True)
    assert page.text_content("#link-text") == "paused"
    page.evaluate(HIDE, False)
    page.wait_for_selector("#link[data-state=live]")


def test_lost_connection_comes_back_by_itself(browser, server):
    with opened(browser, server, allowed=["live view", "ERR_FAILED"]) as page:
        page.route("**/live/events", lambda route: route.abort())
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # a second time changes nothing
        assert page.get_attribute("#link", "data-state") == "live"
        page.reload()
        page.wait_for_selector("#link[data-state=lost]")
        page.unroute("**/live/events")
        page.wait_for_selector("#link[data-state=live]")


def test_configuration_and_plugins_are_those_of_the_server(page):
    page.click("#tab-config")
    page.fill("#config-filter", "scheduler.max_num_seqs")
    assert page.locator("#settings tbody tr:visible").all_text_contents() == [
        "scheduler.max_num_seqs4command linescheduler.max_num_seqs=4"
    ]
    assert page.locator("#pipeline tbody tr").count() == 12
    page.click("#tab-plugins")
    page.fill("#plugin-filter", "backend cpu")
    assert re.fullmatch(
        r"backendcpuframework[\d.]+1\.0active", page.locator("#components tbody tr:visible").first.text_content()
    )


def test_arrow_keys_choose_a_view_and_the_address_remembers_it(page):
    page.focus("#tab-playground")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#live") and not page.is_visible("#playground")
    page.reload()
    assert page.get_attribute("#tab-live", "aria-selected") == "true"
    page.focus("#tab-live")
    page.keyboard.press("ArrowLeft")
    assert page.is_visible("#playground")


def test_theme_follows_the_system_until_it_is_chosen_and_is_remembered(browser, server):
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, server, color_scheme="dark") as page:
        dark = page.evaluate(ground)
        page.click("#theme")
        light = page.evaluate(ground)
        page.reload()
        assert page.evaluate(ground) == light != dark


@pytest.mark.parametrize("view", ["playground", "live", "config", "plugins"])
def test_narrow_page_does_not_scroll_sideways(browser, server, view):
    with opened(browser, server, viewport=NARROW) as page:
        page.click(f"#tab-{view}")
        assert page.evaluate("document.documentElement.scrollWidth") == NARROW["width"]


def test_nothing_moves_while_an_answer_is_streamed(page):
    page.evaluate(SHIFTS)
    fill(page, max_tokens=40, temperature=0)
    ask(page)
    answer(page)
    assert page.evaluate("window.shift") < 0.01


@pytest.mark.parametrize("kind", ["curl", "python"])
def test_copied_command_gets_the_same_answer(browser, server, kind):
    if kind == "python":
        pytest.importorskip("openai")
    elif shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with opened(browser, server, permissions=["clipboard-read", "clipboard-write"]) as page:
        fill(page, max_tokens=5, temperature=0, min_p=0.1)
        page.fill("#prompt", 'It\'s "one"')
        page.click(f"#copy-{kind}")
        playwright.expect(page.locator(f"#copy-{kind}")).to_have_text("Copied")
        command = page.evaluate("navigator.clipboard.readText()")
        page.press("#prompt", "Enter")
        said = answer(page)
    words = ["sh", "-c", command] if kind == "curl" else [sys.executable, "-c", command]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, "NO_PROXY": "127.0.0.1"})
    assert run.returncode == 0, run.stderr
    assert (run.stdout if kind == "python" else streamed_text(run.stdout)) == said


def streamed_text(events):
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def test_page_asks_for_a_key_where_the_server_wants_one(browser, server):
    def answer_about(route):
        is_known = route.request.headers.get("authorization") == "Bearer open-sesame"
        body = {"error": {"message": "a valid API key is needed", "type": "authentication_error"}}
        route.continue_() if is_known else route.fulfill(status=401, json=body)

    with opened(browser, server, allowed=["status of 401"]) as page:
        page.route("**/about", answer_about)
        page.reload()
        page.wait_for_selector("#key-form", state="visible")
        assert not page.is_visible("#fault") and page.is_disabled("#send")
        page.fill("#key", "open-sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#link[data-state=live]")
        assert not page.is_visible("#key-form") and page.is_enabled("#send")
