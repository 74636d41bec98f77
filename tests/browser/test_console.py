"""The console in a real Chromium: live updates without reload, charts, folds, log tail, no script, no outside request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.persist import persist
from orchestrator.store import Store
from orchestrator.store.logs import NewLine
from stages.domain import Phase
from stages.records import Progress, StepDone
from tests.chromium import MARKS
from tests.console_cycle import Seeded, seed_cycle, stretch_times
from tests.console_people import cookie_for
from tests.console_server import serving

pytestmark = MARKS


@dataclass(frozen=True, slots=True)
class World:
    store: Store
    base: str
    done: Seeded
    running: Seeded


@dataclass
class Watch:
    """What a page asked for and complained about."""

    outside: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def world(module_store: Store, module_folder: Path) -> Iterator[World]:
    store, folder = module_store, module_folder
    done = seed_cycle(store, folder)
    running = seed_cycle(store, folder, name="live", until=2, running=True, offset=2_000_000)
    for seeded in (done, running):
        stretch_times(store, seeded.cycle.id or 0)
    with serving(store) as base:
        yield World(store, base, done, running)


def new_page(browser: Any, world: World, **options: object) -> tuple[Any, Watch]:
    context = browser.new_context(**options)
    context.add_cookies([{**cookie_for(world.store), "url": world.base}])
    context.set_default_timeout(20_000)
    page = context.new_page()
    watch = Watch()
    page.on("request", lambda r: watch.outside.append(r.url) if not r.url.startswith((world.base, "data:")) else None)
    page.on("pageerror", lambda e: watch.complaints.append(str(e)))
    page.on("console", lambda m: watch.complaints.append(m.text) if m.type in ("error", "warning") else None)
    return page, watch


def until(page: Any, expression: str, seconds: float = 20) -> None:
    """Wait until the expression is true. (Playwright's own wait uses eval, which the page's policy forbids.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not within {seconds} s: {expression}"
        page.wait_for_timeout(100)


def test_a_running_cycle_moves_without_reload(browser: Any, world: World) -> None:
    page, watch = new_page(browser, world)
    store, stage = world.store, world.running.stages[2]
    page.goto(f"{world.base}/cycles/{world.running.cycle.id}")
    page.wait_for_selector("#chart-ev .main-svg")
    page.evaluate("window.marker = 'the same document'")
    assert page.locator("#strip .n-running progress").get_attribute("value") == "4"
    before = page.locator("#ev summary").inner_text()

    persist(store, stage, Progress(phase=Phase.JOINT, done=9, total=12, text="success 0.91"))
    until(page, "document.querySelector('#strip .n-running progress').value === 9")
    assert "success 0.91" in page.locator("#strip").inner_text()

    # A zoom survives the next step, and the new point is drawn.
    page.evaluate("Plotly.relayout('chart-ev', {'xaxis.range': [2, 6]})")
    points = "document.getElementById('chart-ev').data.reduce((n, t) => n + t.y.length, 0)"
    drawn = page.evaluate(points)
    persist(store, stage, StepDone(phase=Phase.JOINT, step=50, metrics={"critic/vf_explained_var": 0.4}))
    until(page, f"{points} === {drawn + 1}")
    assert page.evaluate("document.getElementById('chart-ev').layout.xaxis.range") == [2, 6]
    until(page, f"document.querySelector('#ev summary').innerText !== {before!r}")

    assert page.evaluate("window.marker") == "the same document"
    assert watch.complaints == []
    page.context.close()


def test_the_log_tail_follows_only_a_reader_at_its_end(browser: Any, world: World) -> None:
    page, _ = new_page(browser, world)
    cycle_id = world.running.cycle.id or 0
    page.goto(f"{world.base}/cycles/{cycle_id}")
    gap = "(() => { const l = document.getElementById('log-lines'); return l.scrollHeight - l.scrollTop - l.clientHeight })()"
    assert page.evaluate(gap) < 24
    world.store.logs.append(cycle_id, [NewLine(level=20, text=f"pushed {i}") for i in range(5)])
    page.wait_for_selector("#log-lines :text('pushed 4')")
    assert page.evaluate(gap) < 24
    page.evaluate("document.getElementById('log-lines').scrollTop = 10")
    page.wait_for_timeout(200)
    world.store.logs.append(cycle_id, [NewLine(level=40, text="<em>later</em>")])
    page.wait_for_selector("#log-lines :text('<em>later</em>')")
    assert page.evaluate("document.getElementById('log-lines').scrollTop") == 10
    assert page.locator("#log-lines em").count() == 0
    page.context.close()


def test_folds_are_remembered_and_permalinks_lead_to_their_turn(browser: Any, world: World) -> None:
    page, watch = new_page(browser, world, viewport={"width": 1000, "height": 500})
    address = f"{world.base}/trajectories/{world.done.hostile_id}"
    page.goto(address)
    fold = page.locator("details[data-fold=t1]")
    assert fold.get_attribute("open") is None
    fold.locator("summary").click()
    page.locator("details[data-fold=t0] summary").click()
    page.wait_for_timeout(200)
    page.goto(f"{world.base}/cycles")
    page.goto(f"{address}#t3")
    until(page, "document.querySelector('details[data-fold=t1]').open")
    assert not page.evaluate("document.querySelector('details[data-fold=t0]').open")
    until(page, "document.getElementById('t3').getBoundingClientRect().top < innerHeight")
    assert page.evaluate("document.title").startswith("evil<task>")
    assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert watch.complaints == []
    page.context.close()


def test_everything_reads_without_script(browser: Any, world: World) -> None:
    page, watch = new_page(browser, world, java_script_enabled=False)
    page.goto(f"{world.base}/cycles/{world.done.cycle.id}")
    assert page.locator("#strip .node").count() == 5
    page.locator("#ev summary").click()
    assert page.locator("#ev tbody tr").count() == 24
    page.locator("nav >> text=Trajectories").click()
    page.locator("summary >> text=Filters").click()
    page.locator(".choices a >> text=passed").first.click()
    assert "verdict=passed" in page.url
    page.locator("tbody a").first.click()
    assert page.locator(".turn").count() >= 3
    page.fill("#jump", f"{world.done.cycle.id}/RSR-2")
    page.locator("#jump").press("Enter")
    assert "Δφ = 0 verified" in page.locator("main").inner_text()
    assert watch.outside == []
    page.context.close()


def test_slash_jumps_and_a_new_cycle_appears(browser: Any, world: World, tmp_path: Path) -> None:
    page, watch = new_page(browser, world)
    page.route("**/hx-sse.min.js*", lambda route: (time.sleep(0.5), route.continue_()))  # live however late it comes
    with page.expect_request("**/events?*"):
        page.goto(f"{world.base}/cycles")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "jump"
    assert page.input_value("#jump") == ""
    seed_cycle(world.store, tmp_path, name="just launched", until=0, running=True, offset=5_000_000)
    page.wait_for_selector("tbody :text('just launched')")
    assert page.evaluate("document.activeElement.id") == "jump"
    assert watch.complaints == []
    page.context.close()
