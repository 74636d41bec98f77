"""A reviewer's day in a real Chromium: by keyboard, by mouse and without a script; the suspended cycle goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator import models as m
from orchestrator.finished import StoredPhases
from orchestrator.gate import policy_of
from orchestrator.store import Store
from tests.chromium import MARKS
from tests.console_people import cookie_for
from tests.console_server import serving
from tests.review_world import Gate, NewGate

pytestmark = MARKS


@pytest.fixture(scope="module")
def house(module_store: Store) -> Iterator[tuple[Store, str]]:
    with serving(module_store) as base:
        yield module_store, base


def new_page(browser: Any, house: tuple[Store, str], login: str, **options: Any) -> tuple[Any, list[str]]:
    store, base = house
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    context.add_cookies([{**cookie_for(store, login), "url": base}])
    context.set_default_timeout(10_000)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("console", lambda c: complaints.append(c.text) if c.type in ("error", "warning") else None)
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith((base, "data:")) else None)
    return page, complaints


def press(page: Any, key: str) -> None:
    """A key that leads to another page."""
    with page.expect_navigation(wait_until="load"):
        page.keyboard.press(key)


def click(page: Any, selector: str) -> None:
    """A link or a button that leads to another page."""
    with page.expect_navigation(wait_until="load"):
        page.click(selector)


def approved(gate: Gate) -> set[str] | None:
    return StoredPhases(gate.store, gate.stage, policy_of(gate.store, gate.stage)).approved()


def test_by_keyboard_a_leak_is_rejected_and_the_cycle_goes_on_by_itself(
    browser: Any, house: tuple[Store, str], new_gate: NewGate, submitted: list[int]
) -> None:
    store, base = house
    gate = new_gate(clean=2)
    page, complaints = new_page(browser, house, "ada")
    page.goto(f"{base}/")
    click(page, "nav >> text=Reviews (3)")
    click(page, "text=Start reviewing")
    decided: list[str] = []
    for number in range(4):  # the first is undone, and decided again
        runbook = page.url.split("/")[-1].split("?")[0]
        if runbook == gate.soft:
            assert page.is_disabled("#approve")  # nothing was looked at yet
            page.keyboard.press("a")
            assert page.locator("mark.here").count() >= 1  # it leads to the finding instead
            assert not page.is_disabled("#approve")
            page.keyboard.press("e")
            page.keyboard.press("r")
            press(page, "2")
        else:
            press(page, "a")
        decided.append(runbook)
        if number == 0:
            press(page, "u")
            assert page.url.split("/")[-1] == runbook
            assert store.reviews.standing(runbook, 1).keys() == {"rules"}
    assert decided[0] == decided[1]
    assert set(decided) == {*gate.clean, gate.soft}
    assert "Nothing waits for you" in page.content()
    rows = {i: store.runbooks.get(i).state for i in (*gate.clean, gate.soft, gate.hard)}
    assert rows == {
        **dict.fromkeys(gate.clean, m.RunbookState.APPROVED),
        gate.soft: m.RunbookState.REJECTED,
        gate.hard: m.RunbookState.REJECTED,
    }
    assert store.reviews.standing(gate.soft, 1)["person:ada"].reason == "gives a value that must be read or computed"
    assert submitted == [gate.cycle_id]
    assert store.cycles.get(gate.cycle_id).state is m.CycleState.RESUMING
    assert approved(gate) == set(gate.clean)
    assert complaints == []
    page.context.close()


def test_without_a_script_every_form_works(
    browser: Any, house: tuple[Store, str], new_gate: NewGate, submitted: list[int]
) -> None:
    store, base = house
    gate = new_gate(clean=1)
    page, _ = new_page(browser, house, "bob", java_script_enabled=False)
    page.goto(f"{base}/reviews/{gate.soft}")
    click(page, "#approve")
    assert "not looked at yet" in page.content()
    page.fill("#comment", "the value stands nowhere")
    click(page, "text=Add")
    click(page, "text=Put off")
    assert gate.clean[0] in page.url
    click(page, "text=Claim for 30 minutes")
    click(page, "#approve")
    assert gate.soft in page.url  # what was put off comes last
    page.check('input[name="seen"] >> nth=0')
    for box in page.locator('input[name="seen"]').all():
        box.check()
    click(page, "#approve")
    assert "may stay" in page.locator(".problem").first.text_content()
    click(page, "#reject")
    assert "needs a reason" in page.content()
    click(page, "text=Edit, as revision 2")
    page.fill("#edit", page.input_value("#edit").replace("rm", "rm -f") + "\nls  [turn 0]")
    click(page, "text=Store revision 2")
    assert "revision 2" in page.locator("h1").text_content()
    assert "You wrote this revision" in page.content()
    assert "+ added" in page.content()
    other, _ = new_page(browser, house, "cyd", java_script_enabled=False)
    other.goto(f"{base}/reviews?mine=1")
    other.check(f'input[value="{gate.soft}"]')
    other.select_option("#b-number", "7")
    click(other, "form#bulk button:has-text('Reject')")
    assert "Nothing waits for you" in other.content()
    assert submitted == [gate.cycle_id]
    assert store.cycles.get(gate.cycle_id).state is m.CycleState.RESUMING
    assert approved(gate) == {gate.clean[0]}
    page.context.close()
    other.context.close()


def test_keys_can_be_switched_off(browser: Any, house: tuple[Store, str], new_gate: NewGate) -> None:
    store, base = house
    gate = new_gate(clean=1)
    page, _ = new_page(browser, house, "ada")
    page.goto(f"{base}/reviews/{gate.clean[0]}")
    page.keyboard.press("?")
    click(page, "#keys")
    assert page.get_attribute("#keys", "data-on") == "0"
    page.keyboard.press("a")
    page.wait_for_timeout(300)
    assert "person:ada" not in store.reviews.standing(gate.clean[0], 1)
    page.keyboard.press("?")
    assert not page.locator("#help").get_attribute("open")
    page.click("#help summary")
    click(page, "#keys")
    press(page, "a")
    assert "person:ada" in store.reviews.standing(gate.clean[0], 1)
    page.context.close()
