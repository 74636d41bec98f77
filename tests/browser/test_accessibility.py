"""Every page in a real browser, light and dark, wide and narrow: no WCAG 2.2 A or AA violation (axe), nothing wider than the
screen, no outside request, no script error, no violation of the content policy. Pages are found from the routes.
"""

from __future__ import annotations

import os
import re
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


def test_every_page_is_accessible_quiet_and_fits(browser: Any, world: tuple[Everything, str]) -> None:
    """The first example of every page."""
    check(browser, world, thorough=False)


@pytest.mark.full
def test_every_view_is_accessible_quiet_and_fits(browser: Any, world: tuple[Everything, str]) -> None:
    """Every example of every page; on a narrow screen loaded there, and with the rules that its size can break."""
    check(browser, world, thorough=True)


def check(browser: Any, world: tuple[Everything, str], *, thorough: bool) -> None:
    everything, base = world
    found: list[str] = []
    for signed_in in (True, False):
        context = browser.new_context(viewport=WIDE)
        context.set_default_timeout(60_000)
        if signed_in:
            context.add_cookies([{**cookie_for(everything.store, everything.login), "url": base}])
        page, said = context.new_page(), list[str]()
        page.on("request", lambda r, to=said: None if r.url.startswith((base, "data:")) else to.append(r.url))
        page.on("pageerror", lambda e, to=said: to.append(str(e)))
        page.on("console", lambda m, to=said: to.append(m.text) if m.type in ("error", "warning") else None)
        for route, addresses in examples(everything).items():
            if (route in SIGN_IN) == signed_in:
                continue
            for address in addresses if thorough else addresses[:1]:
                found += [f"{address}: {what}" for what in faults(page, base, address, thorough=thorough)]
                found += [f"{address}: {what}" for what in said if "404" not in what]  # Chromium tells of such a page
                said.clear()
        context.close()
    assert not found, "\n".join(found)


def faults(page: Any, base: str, address: str, *, thorough: bool) -> list[str]:
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.set_viewport_size(WIDE)
    answer = page.goto(base + address, wait_until="load")
    assert answer.status in (200, 404), (address, answer.status)
    if page.locator(".chart").count():
        page.wait_for_selector(".chart .main-svg")
    keep(page, address, "light")
    page.evaluate(axe.AXE_SCRIPT)
    found = [*violations(page, "light", EVERY_RULE), *too_wide(page)]
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    found += violations(page, "dark", COLOURS)
    page.set_viewport_size(NARROW)
    if thorough:
        page.reload(wait_until="load")
        page.evaluate(axe.AXE_SCRIPT)
        found += violations(page, "narrow", PLACES)
    found += too_wide(page)
    keep(page, address, "dark-narrow")
    return found


def too_wide(page: Any) -> list[str]:
    """Charts follow a new width a moment later."""
    for _ in range(20):
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if over <= 0:
            return []
        page.wait_for_timeout(100)
    return [f"{over} px wider than the screen of {page.viewport_size['width']} px"]


def keep(page: Any, address: str, look: str) -> None:
    """A picture for people, where CI wants some."""
    if folder := os.environ.get("RSI_SCREENSHOTS"):
        name = re.sub(r"\W+", "-", address).strip("-")[:60] or "overview"
        page.screenshot(path=f"{folder}/{name}-{look}.png", full_page=True)


def violations(page: Any, look: str, only: dict[str, Any]) -> list[str]:
    told = page.evaluate(
        "only => axe.run(document, {runOnly: only, resultTypes: ['violations'], preload: false})", only
    )
    return [
        f"{look}: {v['id']}: {node['target']} {' '.join(node['failureSummary'].split())[:300]}"
        for v in told["violations"]
        for node in v["nodes"][:3]
    ]
