"""The page of `asyncrl inspect` in a real browser."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from asyncrl_plugins.viewer.inspect.server import InspectServer
from tests.plugins.viewer.made_up_samples import (
    AGREED_TICKET,
    CONVERSATION_TICKET,
    GROUP_SIZE,
    HOSTILE_TICKET,
    LONG,
    LONG_TICKET,
)

PATIENCE_MS = 10_000


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Whatever the page complains about fails the test."""
    opened = browser.new_page(viewport={"width": 1300, "height": 850})
    opened.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}") or dialog.dismiss())
    yield opened
    opened.close()
    assert complaints == []


def open_at(page: Any, server: InspectServer, query: str = "") -> None:
    page.goto(server.url + query)
    page.wait_for_selector(".completion")


def words(page: Any) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def until(page: Any, condition: str) -> None:
    """Playwright's own wait evaluates text as a script, which the page does not allow."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"not within {PATIENCE_MS} ms: {condition}"
        page.wait_for_timeout(10)


def rows(page: Any) -> list[str]:
    return [link.get_attribute("data-sample") for link in page.query_selector_all("#list a")]


def test_filtering_by_status_shows_those_and_says_so_in_the_address(page: Any, server: InspectServer) -> None:
    open_at(page, server)
    page.check("[value=error]", force=True)
    until(page, "document.querySelectorAll('#list a').length === 6")
    assert rows(page) == [f"{ticket}.3" for ticket in (60, 50, 40, 30, 20, 10)]
    assert words(page) == {"status": "error", "sample": "60.3"}
    page.wait_for_selector(".problem")
    assert "reward_exception" in page.inner_text(".problem")
    page.fill("[name=prompt]", "question 4")
    until(page, "document.querySelectorAll('#list a').length === 1")
    page.reload()
    page.wait_for_selector(".completion")
    assert rows(page) == ["40.3"], "the address carries the filters"
    assert page.is_checked("[value=error]")
    page.click("#clear")
    until(page, "document.querySelectorAll('#list a').length === 50")


def test_pages_forward_and_back(page: Any, server: InspectServer) -> None:
    open_at(page, server)
    assert page.inner_text("#range") == "1–50 of 240"
    first = rows(page)
    page.click("#next")
    until(page, "document.querySelector('#range').textContent === '51–100 of 240'")
    assert not set(rows(page)) & set(first)
    assert words(page)["page"] == "2"
    page.keyboard.press("[")
    until(page, "document.querySelector('#range').textContent === '1–50 of 240'")
    assert rows(page) == first
    page.go_back()
    until(page, "document.querySelector('#range').textContent === '51–100 of 240'")


def test_keys_move_through_samples_and_over_the_end_of_a_page(page: Any, server: InspectServer) -> None:
    open_at(page, server, "?order=newest")
    for _ in range(GROUP_SIZE):
        page.keyboard.press("j")
    page.wait_for_selector("h2:text-is('Ticket 59')")
    page.keyboard.press("k")
    page.wait_for_selector("h2:text-is('Ticket 60')")
    assert page.get_attribute(".completion.chosen", "data-trajectory") == "3"
    assert words(page)["sample"] == "60.3"
    page.click("#list li:last-child a")
    last = words(page)["sample"]
    page.keyboard.press("j")
    until(page, "document.querySelector('#range').textContent.startsWith('51')")
    until(page, "document.querySelector('#list a')?.getAttribute('aria-current') === 'true'")
    page.keyboard.press("k")
    until(page, "document.querySelector('#range').textContent.startsWith('1–')")
    until(page, f"document.querySelector('#list [aria-current]')?.dataset.sample === '{last}'")


def test_a_sample_shows_its_image_and_every_fact_of_a_token(page: Any, server: InspectServer) -> None:
    open_at(page, server)
    page.click("a[data-sample='58.1']")
    page.wait_for_selector("h2:text-is('Ticket 58')")
    until(page, "document.querySelector('.pictures img')?.naturalWidth === 98")
    page.hover(".completion.chosen .tokens span:nth-child(7)")
    card = page.inner_text(".token-card")
    for fact in ("<|im_end|>", "7 of 7", "−6.0000", "−8.0000", "−2.0000", "58", "in the loss"):
        assert fact in card
    page.hover(".completion.chosen .tokens span:nth-child(3)")
    assert "taken out by the correction" in page.inner_text(".token-card")
    page.focus(".completion.chosen .tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "not sampled" in page.inner_text(".token-card")
    page.click(".pictures button")
    until(page, "document.querySelector('#picture img')?.naturalWidth === 98")
    page.keyboard.press("Escape")
    assert page.query_selector("dialog[open]") is None


def test_a_conversation_shows_turns_with_versions_calls_and_pictures_at_their_places(
    page: Any, server: InspectServer
) -> None:
    open_at(page, server, f"?sample={CONVERSATION_TICKET}.1")
    until(page, "[...document.querySelectorAll('.shown img')].every(image => image.naturalWidth)")
    sizes = "images => images.map(image => [image.naturalWidth, image.naturalHeight])"
    assert page.eval_on_selector_all(".question .shown img", sizes) == [[56, 28]], "the opening's"
    one = page.locator(".completion.chosen")
    top = one.bounding_box()["y"]
    assert 0 <= top < 850, f"pictures that came later have moved it to {top}"
    assert one.locator(".shown img").evaluate_all(sizes) == [[28, 84]]
    told = one.inner_text()
    for parts in (
        ("turn 0", "reward 0.50", "version 6, 8", "stop"),
        ("read 6", "call crop", '{"row": 1} ok 0.25 s', '{"hit":true}', "cell 1:"),
        ("new segment 2 tokens of history", "turn 1", "reward –", "length"),
        ("call crop {} arguments:", "ended by environment.limits.turns"),
    ):
        places = [re.sub(r"\s+", " ", told).find(part) for part in parts]
        assert -1 not in places, (parts, told)
        assert places == sorted(places)
    assert one.locator(".tokens").evaluate_all("boxes => boxes.map(box => box.querySelectorAll('span').length)") == [
        2,
        2,
        3,
    ]
    assert page.evaluate("window.hacked") is None


def test_switching_the_colouring_repaints_the_tokens(page: Any, server: InspectServer) -> None:
    open_at(page, server, "?sample=58.0")

    def painted() -> list[str]:
        script = "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
        return page.eval_on_selector_all(".completion:first-of-type .tokens span", script)

    seen = {"diff": painted()}
    for number, name in ((2, "version"), (3, "mask"), (4, "logprob")):
        page.keyboard.press(str(number))
        page.wait_for_selector(f".tokens[data-colour={name}]")
        seen[name] = painted()
        assert words(page)["colour"] == name
    clear = "rgba(0, 0, 0, 0)"
    assert len({tuple(colours) for colours in seen.values()}) == 4
    assert [colour != clear for colour in seen["mask"]] == [False, True, True, False, False, False, False]
    page.check("[value=diff]", force=True)
    assert painted() == seen["diff"]
    assert len(set(seen["diff"])) == 7, "noise, not sampled, and a colour for each of five sizes"


def test_a_group_opens_with_a_colouring_that_colours_it(page: Any, server: InspectServer) -> None:
    """By difference where learner and engine differ, else by probability, until somebody chooses."""

    def shown() -> tuple[str, int]:
        script = "spans => spans.filter(s => getComputedStyle(s).backgroundColor !== 'rgba(0, 0, 0, 0)').length"
        sampled = page.eval_on_selector_all(".completion:first-of-type .tokens span:not([data-mask=u])", script)
        return page.get_attribute("[name=colour]:checked", "value"), sampled

    open_at(page, server, "?sample=58.0")
    assert shown() == ("diff", 5)
    open_at(page, server, f"?sample={AGREED_TICKET}.0")
    assert shown() == ("logprob", 5)
    assert "colour" not in words(page)
    page.keyboard.press("1")
    page.wait_for_selector(".tokens[data-colour=diff]")
    assert shown() == ("diff", 0)
    page.reload()
    page.wait_for_selector(".completion")
    assert shown() == ("diff", 0), "what was chosen stays"


def test_hostile_text_stays_text(page: Any, server: InspectServer) -> None:
    open_at(page, server, f"?sample={HOSTILE_TICKET}.0&order=oldest")
    for selector in (".messages", ".completion .tokens", "#list"):
        shown = page.inner_text(selector)
        assert "<script>window.hacked=1</script>" in shown
        assert "\\x1b[31mred" in shown
        assert not set(shown) & set("\x1b\x07\u202e")
    assert page.evaluate("window.hacked") is None
    assert page.query_selector("#group script, #list script, img[src=x]") is None
    assert "image 2: its 21 bytes are no image" in page.inner_text(".pictures")
    assert "it is gone" in page.inner_text(".pictures")


def test_a_long_completion_is_shown_in_parts(page: Any, server: InspectServer) -> None:
    open_at(page, server, f"?sample={LONG_TICKET}.0")
    count = "document.querySelector('.tokens').querySelectorAll('span').length"
    assert page.evaluate(count) == 4000
    page.click(".more-tokens >> nth=0")
    page.click(".more-tokens >> nth=0")
    assert page.evaluate(count) == LONG
    assert page.evaluate("document.querySelector('.tokens').querySelector('.more-tokens')") is None


def test_a_filter_that_cannot_be_read_is_marked(browser: Any, server: InspectServer) -> None:
    page = browser.new_page(viewport={"width": 420, "height": 800})  # the browser itself complains about the answer 400
    page.set_default_timeout(PATIENCE_MS)
    open_at(page, server)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420, "nothing is cut off"
    page.fill("[name=reward]", "much")
    page.wait_for_selector("[name=reward][aria-invalid=true]")
    assert "reward cannot be 'much'" in page.inner_text("#notice")
    page.fill("[name=reward]", "<0")
    page.wait_for_selector("[name=reward][aria-invalid=false]")
    page.close()
