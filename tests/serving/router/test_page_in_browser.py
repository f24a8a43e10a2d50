"""The page in a headless Chromium, in front of a router and engines."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_serving.router.page import PAGE_PATHS
from tests.conftest import skip
from tests.serving.router.browser import NAMES, Browser, find_browser
from tests.serving.router.support import ADAPTER, APART, BLOCK, COUPLED, MODEL, tokens_of
from tests.serving.router.test_others import metrics
from tests.serving.router.test_placing import prefill_of
from tests.waiting import eventually

ANSWER, WHY = ".message.assistant:last-child .text", ".message.assistant:last-child .why"
BARS = "[...document.querySelector('.bar').children].map(one => one.className)"
QUESTION = "What is a cache?" + "?" * 32
HOSTILE = "<img src=x onerror='window.isOurs = true'><b>bold</b>"


@pytest.fixture
def browse(tmp_path):
    """Opens the page of a router, in a browser that ends with the test."""
    program = find_browser()
    if program is None:
        skip("chromium", f"none of {', '.join(NAMES)} is installed (apt install chromium)")
    browsers: list[Browser] = []

    def browse(router, **more) -> Browser:
        browser = Browser(program, tmp_path / f"profile-{len(browsers)}", **more)
        browsers.append(browser)
        browser.open(router.server.url)
        eventually(lambda: browser.text("#state") not in ("", "connecting"))
        return browser

    yield browse
    for browser in browsers:
        browser.close()


def send(browser: Browser, text: str, max_tokens: int = 5) -> None:
    browser.run(f"document.getElementById('max-tokens').value = {max_tokens}")
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press("Enter")


def num_of(browser: Browser, selector: str) -> int:
    return browser.run(f"document.querySelectorAll({json.dumps(selector)}).length")


def test_a_chat_is_streamed_and_explained(cluster, browse):
    router, engines = cluster(APART, admission={"ttft_s": 60.0})
    browser = browse(router)
    eventually(lambda: num_of(browser, "#model option") == 2)
    assert browser.text("#model") == f"{MODEL}\n{ADAPTER}"
    for turn in (1, 2):
        send(browser, QUESTION)
        eventually(lambda turn=turn: num_of(browser, "[aria-busy=false]") == turn)
        eventually(lambda: "First token after" in browser.text(WHY))
        entry = router.last()
        prefill, decode = entry["prefill"], entry["decode"]["instance"]
        path, body, _ = engines[decode].calls[-1]
        answer = "".join(engines[decode]._words(body))
        assert path == "/v1/chat/completions" and browser.text(ANSWER) == answer
        spoken = [one["role"] for one in body["messages"]]
        assert spoken == ["user", "assistant", "user"][: 2 * turn - 1]
        why = browser.text(WHY)
        assert f"{prefill['instance']} computed the prompt; {prefill['cached_tokens']} of" in why
        assert f"of {entry['prompt_tokens']} tokens were cached there" in why
        assert f"{decode} generates, a token every" in why and "predicted every" in why
    assert prefill["cached_tokens"] == len(tokens_of("<user>" + QUESTION)) // BLOCK * BLOCK
    assert browser.run("document.activeElement.id") == "prompt"

    rows = "[...document.querySelectorAll('#engines tr')].map(row => row.cells[0].innerText)"
    assert browser.run(rows) == [f"{name}\n{role}, up" for name, role in APART.items()]
    eventually(lambda: num_of(browser, "#requests li") == 2)
    row = browser.text("#requests li")
    assert f"{prefill['instance']} → {decode}" in row and "answered" in row
    assert browser.run(BARS) == ["placing", "prefill", "handoff", "decode", "predicted"]
    assert "100 %\n2 of 2 met their objectives" in browser.text("#summary")
    assert browser.errors == []


def test_a_refusal_is_told_with_its_reason(cluster, browse):
    router, _ = cluster(APART, admission={"ttft_s": 1e-6})
    browser = browse(router)
    eventually(lambda: num_of(browser, "#model option"))
    send(browser, "A question")
    eventually(lambda: "Not answered (429): overloaded: TTFT" in browser.text(WHY))
    assert router.last()["reason"] in browser.text(WHY)
    assert browser.run("document.getElementById('prompt').value") == "A question"
    eventually(lambda: browser.text("#refusals").startswith("1: the first token would come later"))
    assert "refused" in browser.text("#requests li")
    assert "0 of 1 met their objectives" in browser.text("#summary")


def test_engines_that_go_down_and_streams_that_break_are_shown(cluster, browse):
    router, engines = cluster({"both": "both"})
    browser = browse(router)
    eventually(lambda: num_of(browser, "#model option"))
    engines["both"].die_after = 2
    send(browser, "A question")
    eventually(lambda: "Ended early: both:" in browser.text(WHY))
    assert "both computed the prompt and generates" in browser.text(WHY)
    assert len(browser.text(ANSWER)) > 0
    engines["both"].die_after, engines["both"].stall_after = -1, 2
    send(browser, "Another one")
    eventually(lambda: len(browser.text(ANSWER)) > 0 and num_of(browser, ".message") == 4)
    browser.run("document.getElementById('stop').click()")
    eventually(lambda: engines["both"].num_left == 1)
    eventually(lambda: "Ended early: stopped" in browser.text(WHY))
    browser.run("document.getElementById('clear').click()")
    assert num_of(browser, ".message") == 0
    engines["both"].server.kill()
    eventually(lambda: browser.text("#engines th") == "both\nboth, down")
    router.server.kill()
    eventually(lambda: browser.text("#state").startswith("not connected: "))


def test_an_answer_is_explained_by_its_last_attempt(cluster, browse):
    router, engines = cluster(COUPLED)
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 5}
    fails = prefill_of(router.client.post("/v1/chat/completions", json=body))  # which caches it
    [answers] = COUPLED.keys() - {fails}
    engines[fails].fail_with, engines[answers].stall_after = 500, 2
    browser = browse(router)
    eventually(lambda: num_of(browser, "#model option"))
    send(browser, QUESTION)
    eventually(lambda: len(browser.text(ANSWER)) > 0 and num_of(browser, "#requests li") == 3)
    told = f"Attempt 2, as an engine had failed. {answers} computed the prompt and generates"
    assert browser.text(WHY).startswith(told)
    browser.run("document.getElementById('stop').click()")
    eventually(lambda: "Ended early: stopped" in browser.text(WHY))
    assert told in browser.text(WHY)


def test_a_question_without_an_answer_is_not_sent_again_with_the_next(cluster, browse):
    router, engines = cluster({"both": "both"})
    engines["both"]._words = lambda body: []
    browser = browse(router)
    eventually(lambda: num_of(browser, "#model option"))
    for turn in (1, 2):
        send(browser, f"Question {turn}")
        eventually(lambda turn=turn: num_of(browser, "[aria-busy=false]") == turn)
        assert browser.text(ANSWER) == ""
    _, body, _ = engines["both"].calls[-1]
    assert body["messages"] == [{"role": "user", "content": "Question 2"}]


def test_what_others_do_and_an_engine_that_drains_are_shown(cluster, browse):
    router, engines = cluster({"both": "both"})
    engines["both"].load = metrics(2, 1)
    browser = browse(router)
    router.router.placement.drain(0)
    told = "both\nboth, up\ngets no more requests\nof others: 2 running, 1 waiting"
    eventually(lambda: browser.text("#engines th") == told)


def test_what_a_model_says_is_text(cluster, browse):
    names = [HOSTILE, MODEL]
    router, engines = cluster({"both": "both"}, serves={"both": names})
    engines["both"]._words = lambda body: [HOSTILE, "<script>window.isOurs = true</script>"]
    browser = browse(router)
    eventually(lambda: num_of(browser, "#model option") == 2)
    send(browser, HOSTILE)
    eventually(lambda: browser.text(ANSWER) == HOSTILE + "<script>window.isOurs = true</script>")
    assert browser.text(".message.user .text") == HOSTILE
    eventually(lambda: router.get("/decisions")["decisions"])
    assert router.last()["model"] == HOSTILE
    assert num_of(browser, "img, b, body script") == 0
    assert browser.run("window.isOurs ?? null") is None
    # And if the script made HTML of it, the browser would refuse.
    refused = "try { document.body.innerHTML = '<b>' } catch (error) { error.name }"
    assert browser.run(refused) == "TypeError"
    assert num_of(browser, "b") == 0


def test_a_key_is_asked_for_where_one_is_needed(cluster, browse, tmp_path):
    (tmp_path / "keys").write_text("a-key\n")
    router, engines = cluster({"both": "both"}, api_keys_file=str(tmp_path / "keys"))
    browser = browse(router)
    eventually(lambda: num_of(browser, "#key-form:not([hidden])"))
    assert "Authorization must be" in browser.text("#state") and not num_of(browser, "#engines tr")
    for key in ("wrong", "a-key"):
        browser.run("document.getElementById('key').focus()")
        browser.type(key)
        browser.press("Enter")
        eventually(lambda: browser.run("document.getElementById('key').value") == "")
    eventually(lambda: browser.text("#state") == "connected")
    assert num_of(browser, "#key-form[hidden]") == 1
    send(browser, "A question")
    eventually(lambda: engines["both"].calls and browser.text(ANSWER))
    assert "a-key" not in browser.run("document.documentElement.outerHTML")


def test_it_rests_while_it_is_hidden(cluster, browse):
    router, _ = cluster({"both": "both"})
    browser = browse(router)

    def hide(is_hidden: bool) -> None:
        value = f"{{value: {json.dumps(is_hidden)}, configurable: true}}"
        browser.run(f"Object.defineProperty(document, 'hidden', {value})")
        browser.run("document.dispatchEvent(new Event('visibilitychange'))")

    asked = "performance.getEntriesByName(new URL('instances', location)).length"
    hide(True)
    eventually(lambda: browser.text("#state") == "paused while this page is hidden")
    before = browser.run(asked)
    hide(True)  # still
    browser.run("new Promise(go => setTimeout(go, 2500))")
    assert browser.run(asked) == before
    hide(False)
    eventually(lambda: browser.run(asked) > before and browser.text("#state") == "connected")


@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_and_can_be_used_by_keyboard(cluster, browse, width):
    roles = {"an-engine-of-a-very-long-name-in-the-third-row-of-rack-12": "both", "b": "both"}
    router, engines = cluster(roles)
    for engine in engines.values():
        engine._words = lambda body: ["unbroken" * 100]
    browser = browse(router, width=width, is_dark=width == 400)
    eventually(lambda: num_of(browser, "#model option"))
    order = ["log", "prompt", "model", "max-tokens", "temperature", "send", "clear"]
    for name in order:
        browser.press("Tab")
        assert browser.run("document.activeElement.id") == name
    send(browser, "unbroken" * 100)
    eventually(lambda: num_of(browser, "#requests li") and browser.text(ANSWER))
    assert browser.run("document.documentElement.scrollWidth") == width
    fields = "[...document.querySelectorAll('input, select, textarea')]"
    assert browser.run(f"{fields}.map(one => one.labels.length)") == [1, 1, 1, 1, 1]
    back = browser.run("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(15, 19, 24)" if width == 400 else "rgb(246, 247, 249)")


def test_times_that_are_not_known_are_not_shown(cluster, browse):
    """Those of the prefill and of the first token, in an answer that is no stream."""
    router, engines = cluster({"both": "both"})
    engines["both"].gate.clear()
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(router.complete, "What is a cache?")
        browser = browse(router)
        eventually(lambda: "under way" in browser.text("#requests li"))
        assert browser.run(BARS) == ["placing", "predicted"]
        engines["both"].gate.set()
        assert asking.result().status_code == 200
    eventually(lambda: browser.run(BARS) == ["placing", "whole", "predicted"])
    assert "answered" in browser.text("#requests li") and "over after" in browser.text("#requests")
    assert "no streams measured yet" in browser.text("#summary")


def test_its_files_load_without_complaint(cluster, browse):
    router, _ = cluster({"both": "both"})
    browser = browse(router)
    resources = "performance.getEntriesByType('resource')"
    loaded = browser.run(f"{resources}.map(one => new URL(one.name).pathname)")
    assert {path for path in PAGE_PATHS if path != "/"} <= set(loaded)
    assert set(loaded) <= {*PAGE_PATHS, "/v1/models", "/instances", "/decisions"}
    assert browser.errors == []
