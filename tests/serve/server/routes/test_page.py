"""The page at /docs in a browser: a stream is seen as it comes, and Stop ends it in the server."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from cases.waiting import until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path"),
]
WAIT = 60_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as own:
        chromium = own.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(server, browser) -> Iterator[Any]:
    """Shown, with a key; nothing that it does is against its own policy."""
    own, wrong = browser.new_page(), []
    own.set_default_timeout(WAIT)
    own.on("pageerror", lambda error: wrong.append(error))
    own.on("console", lambda said: wrong.append(said.text) if "Security Policy" in said.text else None)
    own.goto(f"{server.url}/docs")
    own.get_by_label("API key").fill("first-key")
    yield own
    own.close()
    assert wrong == []


def ask(page: Any, path: str, body: dict[str, Any]) -> None:
    page.locator(f"nav button[value='{path}']").click()
    page.get_by_label("Body", exact=True).fill(json.dumps(body))
    page.get_by_role("button", name="Send").click()


def says(page: Any, id: str, text: str) -> None:
    playwright.expect(page.locator(id)).to_contain_text(text, timeout=WAIT)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "sort a list"}], "ignore_eos": True}


def test_a_streamed_reply_is_shown(page, server):
    asked = CHAT | {"temperature": 0.0, "max_tokens": 20}
    ask(page, "/v1/chat/completions", asked | {"stream": True})
    says(page, "#status", "200 in")
    with server.openai() as client:
        expected = client.chat.completions.create(
            model="demo", messages=CHAT["messages"], extra_body=asked
        ).choices[0]
    assert page.locator("#text").text_content() == expected.message.content
    assert page.locator("#answer").text_content().endswith("data: [DONE]\n\n")


def test_stop_ends_the_request_in_the_server(page, server):
    """While it runs its text is there already."""
    ask(page, "/v1/chat/completions", CHAT | {"n": 32, "max_tokens": 240, "stream": True})
    playwright.expect(page.locator("#text")).not_to_be_empty(timeout=WAIT)
    assert server.gauges()["vllm:num_requests_running"] > 0
    before = server.gauges()["vllm:generation_tokens_total"]
    page.get_by_role("button", name="Stop").click()
    says(page, "#status", "stopped after")
    until(lambda: server.gauges()["vllm:num_requests_running"] == 0)
    assert server.gauges()["vllm:generation_tokens_total"] < before + 32 * 120  # far from the end


def test_paths_are_tried_by_their_examples(page):
    """Each button's example is answered, and its answer is shown."""
    for button in page.locator("nav button").all():
        path = button.get_attribute("value")
        button.click()
        if "{name}" in path:
            page.get_by_label("name", exact=True).fill("other")
        page.get_by_role("button", name="Send").click()
        says(page, "#status", "200 in")
        assert page.locator("#answer").text_content(), path


def test_errors_and_keys(page):
    page.get_by_label("API key").fill("no-key")
    ask(page, "/v1/completions", {"prompt": "x"})
    says(page, "#status", "401 in")
    says(page, "#answer", "the API key is missing or unknown")
    page.get_by_label("API key").fill("second-key")
    page.reload()  # the key is kept
    ask(page, "/v1/completions", {"prompt": "x", "tempreature": 1})
    says(page, "#answer", "did you mean temperature?")


def test_a_page_elsewhere_may_send_nothing(browser, server):
    """Though a browser sends it without asking, as it does forms."""
    own, url = browser.new_page(), f"{server.url}/v1/completions"
    send = "([url, body]) => fetch(url, {method: 'POST', mode: 'no-cors', body}).then(() => 'sent')"
    with own.expect_response(url, timeout=WAIT) as found:
        assert own.evaluate(send, [url, json.dumps({"prompt": "x"})]) == "sent"
    assert found.value.status == 403
    own.close()
