"""The chat page in a real browser, against the real model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from scheduler.client import Client
from scheduler.gateway.page import page as page_text
from tests.e2e.daemon import Daemon, idle
from tests.gateway import chromium
from tests.gateway.chromium import Page
from tests.gateway.process import GatewayProcess

IDLE = "!document.querySelector('.busy') && document.getElementById('send').textContent === 'Send'"

needs_chromium = pytest.mark.skipif(chromium.PATH is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium.chromium(tmp_path_factory.mktemp("chromium")) as page:
        yield page


def said(page: Page, kind: str) -> list[str]:
    found: list[str] = page.run(f"[...document.querySelectorAll('{kind}')].map(each => each.textContent)")
    return found


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.run("document.getElementById('send').click()")


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    assert "http://" not in page_text()
    assert "https://" not in page_text()


@needs_chromium
def test_a_conversation(browser: Page, gateway: GatewayProcess) -> None:
    browser.show(gateway.url)
    browser.wait_for("document.getElementById('model').textContent === 'SmolLM2-135M-Instruct'")
    browser.run("document.getElementById('temperature').value = 0")
    browser.run("document.getElementById('tokens').value = 6")
    ask(browser, "Name a colour.")
    browser.wait_for(f"document.querySelector('.facts') && {IDLE}")
    assert said(browser, ".user .said") == ["Name a colour."]
    assert said(browser, ".assistant .said")[0].startswith("The colour")
    (facts,) = said(browser, ".facts")
    assert "cached" in facts
    assert "/s" in facts
    assert "cut off" in facts
    ask(browser, "Another one.")
    browser.wait_for(f"document.querySelectorAll('.facts').length === 2 && {IDLE}")
    assert browser.run("turns.map(turn => turn.role).join()") == "user,assistant,user,assistant"
    browser.run("document.getElementById('new').click()")
    assert said(browser, ".turn") == []
    assert browser.run("turns.length") == 0


@needs_chromium
def test_an_answer_that_is_stopped(browser: Page, gateway: GatewayProcess, real_daemon: Daemon) -> None:
    browser.show(gateway.url)
    browser.run("document.getElementById('tokens').value = 4000")
    ask(browser, "Tell me a very long story about a very long road.")
    browser.wait_for("document.querySelector('.assistant .said')?.textContent.length > 20")
    assert browser.run("document.getElementById('send').textContent") == "Stop"
    browser.run("document.getElementById('send').click()")
    browser.wait_for(IDLE)
    assert said(browser, ".facts") == ["stopped"]

    async def settled() -> None:
        async with Client(real_daemon.socket) as asking:
            await idle(asking)

    trio.run(settled)


@needs_chromium
def test_what_goes_wrong_is_told(browser: Page, gateway: GatewayProcess) -> None:
    browser.show(gateway.url)
    ask(browser, "word " * 9000)
    browser.wait_for(f"document.querySelector('.facts.wrong') && {IDLE}")
    assert "context" in said(browser, ".facts.wrong")[0]
    assert browser.run("turns.length") == 0


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone(browser: Page, gateway: GatewayProcess, dark: bool) -> None:
    browser.show(gateway.url, 360, 640, dark=dark, phone=True)
    browser.run("document.querySelector('details').open = true")
    browser.run("turn('user').said.textContent = 'word'.repeat(100)")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    bottom = browser.run("document.getElementById('send').getBoundingClientRect().bottom")
    assert 0 < bottom <= 640
    red = browser.run("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert (red < 64) == dark
