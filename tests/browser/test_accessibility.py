"""axe on every page: no WCAG 2.2 A or AA violation, in light and dark, wide and narrow. Pages are found from the routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.store import Store
from tests.chromium import MARKS
from tests.console_people import app_for, cookie_for
from tests.console_server import serving
from tests.console_world import SIGN_IN, Everything, examples, page_routes, seed_everything

axe = pytest.importorskip("axe_playwright_python.base", reason="pip install axe-playwright-python")
pytestmark = MARKS
EVERY_RULE = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
COLOURS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}  # what dark mode can break
PLACES = {"type": "rule", "values": ["target-size", "scrollable-region-focusable"]}  # what a narrow screen can break
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def world(module_store: Store, module_folder: Path) -> Iterator[tuple[Everything, str]]:
    everything = seed_everything(module_store, module_folder)
    with serving(module_store) as base:
        yield everything, base


def test_every_page_has_an_example(world: tuple[Everything, str]) -> None:
    everything, _ = world
    assert set(page_routes(app_for(everything.store))) == set(examples(everything))


def test_no_page_violates_wcag_2_2_aa(browser: Any, world: tuple[Everything, str]) -> None:
    """The first example of every page, light and dark."""
    check(browser, world, first_only=True)


@pytest.mark.full
def test_no_view_violates_wcag_2_2_aa(browser: Any, world: tuple[Everything, str]) -> None:
    """Every example of every page, on a narrow screen, too."""
    check(browser, world, first_only=False)


def check(browser: Any, world: tuple[Everything, str], *, first_only: bool) -> None:
    everything, base = world
    found: list[str] = []
    for signed_in in (True, False):
        context = browser.new_context(viewport=WIDE)
        context.set_default_timeout(60_000)
        if signed_in:
            context.add_cookies([{**cookie_for(everything.store, everything.login), "url": base}])
        page = context.new_page()
        for route, addresses in examples(everything).items():
            if (route in SIGN_IN) == signed_in:
                continue
            for address in addresses[:1] if first_only else addresses:
                found += violations(page, base, address, narrow=not first_only)
        context.close()
    assert not found, "\n".join(found)


def violations(page: Any, base: str, address: str, *, narrow: bool) -> list[str]:
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.set_viewport_size(WIDE)
    answer = page.goto(base + address, wait_until="load")
    assert answer.status in (200, 404), (address, answer.status)
    page.evaluate(axe.AXE_SCRIPT)
    found = _run(page, f"{address} light", EVERY_RULE)
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    found += _run(page, f"{address} dark", COLOURS)
    if not narrow:
        return found
    page.set_viewport_size(NARROW)
    page.wait_for_timeout(300)  # charts follow the new width
    return found + _run(page, f"{address} narrow", PLACES)


def _run(page: Any, what: str, only: dict[str, Any]) -> list[str]:
    told = page.evaluate("only => axe.run(document, {runOnly: only, resultTypes: ['violations']})", only)
    return [
        f"{what}: {v['id']}: {node['target']} {' '.join(node['failureSummary'].split())[:300]}"
        for v in told["violations"]
        for node in v["nodes"][:3]
    ]
