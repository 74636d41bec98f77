"""The analyst's day in a real Chromium: five checkpoints, a flip, its trajectory, a CSV whose numbers are the page's."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.store import Store
from tests.analysis_world import Analysed, seed_analysis
from tests.chromium import MARKS
from tests.console_cycle import SUITES
from tests.console_people import cookie_for
from tests.console_server import serving

pytestmark = MARKS


@pytest.fixture(scope="module")
def world(module_store: Store, module_folder: Path) -> Iterator[tuple[Analysed, str]]:
    seeded = seed_analysis(module_store, module_folder)
    with serving(module_store) as base:
        yield seeded, base


def open_page(browser: Any, world: tuple[Analysed, str], **options: object) -> tuple[Any, list[str]]:
    seeded, base = world
    context = browser.new_context(**options)
    context.set_default_timeout(20_000)
    context.add_cookies([{**cookie_for(seeded.store, "ana"), "url": base}])
    page = context.new_page()
    complaints: list[str] = []
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith((base, "data:", "blob:")) else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    return page, complaints


def text_of(page: Any, selector: str) -> list[list[str]]:
    rows = page.locator(f"{selector} tbody tr").all()
    return [[re.sub(r"\s+", " ", c).strip() for c in row.locator("th, td").all_inner_texts()] for row in rows]


@pytest.mark.parametrize("script", [True, False], ids=["script", "no-script"])
def test_the_analysts_day(browser: Any, world: tuple[Analysed, str], tmp_path: Path, script: bool) -> None:
    seeded, base = world
    page, complaints = open_page(browser, world, java_script_enabled=script, accept_downloads=True)

    # Five checkpoints are ticked in the picker, and compared on one suite.
    page.goto(base)
    page.locator("nav >> text=Compare").first.click()
    for checkpoint in seeded.checkpoints:
        page.check(f"input[name=c][value='{checkpoint.id}']")
    page.locator("button >> text=Compare").first.click()
    page.locator(f".choices a >> text={SUITES[0]}").click()
    assert page.url.endswith(f"c={','.join(str(c.id) for c in seeded.checkpoints)}&suite={SUITES[0]}&view=scores")
    scores = text_of(page, "#scores")
    differences = text_of(page, "#differences")
    assert [row[0].split()[0] for row in scores] == ["Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2"]
    assert len(differences) == 4

    # The CSV's numbers are the page's.
    for name, shown in (("scores", scores), ("differences", differences)):
        with page.expect_download() as waiting:
            page.locator(f"a >> text={name} as CSV").click()
        waiting.value.save_as(tmp_path / f"{name}.csv")
        with (tmp_path / f"{name}.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(shown)
        for row, cells in zip(rows, shown, strict=True):
            if name == "scores":
                rate = f"{100 * float(row['rate_verdicts']):.1f} % ({row['passed']}/{row['verdicts']})"
                interval = f"[{100 * float(row['verdicts_low']):.1f}, {100 * float(row['verdicts_high']):.1f}]"
                assert cells[1] == f"{rate} {interval}"
            else:
                assert cells[1] == f"▲ {100 * float(row['difference']):+.1f} pp"
                low, high = (f"{100 * float(row[k]):+.1f} pp".replace("-", "−") for k in ("low", "high"))
                assert cells[2] == f"[{low}, {high}]"
                assert cells[5] == f"▲ {row['improved']} ▼ {row['worsened']}"

    # A flip leads to its task, and from there to the trajectory of the checkpoint that flipped it.
    page.locator(".tabs a >> text=matrix").click()
    page.locator("a >> text=flips only").click()
    flip = page.locator("#matrix td.rose a").first
    wanted = re.search(r"checkpoint=(\d+)", flip.get_attribute("href") or "")
    assert wanted is not None
    flip.click()
    row = page.locator(f"tr#c{wanted[1]}.wanted")
    outcome = row.locator("td a").first.inner_text().strip()
    row.locator("td a").first.click()
    assert page.locator(".turn").count() == 3
    assert outcome.split()[-1] in page.locator(".lede").inner_text()
    page.locator("#t1 .meta a").click()
    assert page.locator("h1").inner_text() == "Tokens of turn 1"
    assert complaints == []
    page.context.close()


def test_charts_are_saved_as_pictures(browser: Any, world: tuple[Analysed, str], tmp_path: Path) -> None:
    seeded, base = world
    page, complaints = open_page(browser, world, color_scheme="dark", accept_downloads=True)
    page.goto(f"{base}/compare?c={seeded.checkpoints[0].id},{seeded.checkpoints[4].id}&suite={SUITES[0]}")
    page.wait_for_selector("#chart-scores .main-svg")
    with page.expect_download() as waiting:
        page.locator("[data-png]").click()
    waiting.value.save_as(tmp_path / "scores.png")
    assert (tmp_path / "scores.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "scores.png").stat().st_size > 10_000
    assert complaints == []
    page.context.close()


def test_an_audit_from_form_to_failures(browser: Any, world: tuple[Analysed, str]) -> None:
    seeded, base = world
    page, complaints = open_page(browser, world, viewport={"width": 390, "height": 800})
    page.goto(f"{base}/audits/new?cycle={seeded.seeded.cycle.id}")
    page.fill("#f-checkpoint", "nobody")
    page.locator("button >> text=Run audit").click()
    assert "No checkpoint 'nobody'" in page.locator("#wrong-checkpoint").inner_text()
    page.fill("#f-checkpoint", "")
    page.locator("button >> text=Run audit").click()
    page.wait_for_selector("#chart-rewards .main-svg")
    assert [row[0] for row in text_of(page, "#overall")] == ["FDR", "SPR"]
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    complaints[:] = [c for c in complaints if "422" not in c]  # Chromium tells of the refused form
    assert complaints == []
    page.context.close()


def test_a_bare_permalink_finds_its_turn_in_a_long_trajectory(browser: Any, world: tuple[Analysed, str]) -> None:
    seeded, base = world
    page, complaints = open_page(browser, world)
    page.goto(f"{base}/trajectories/{seeded.seeded.long_id}#t640")
    deadline = time.monotonic() + 20
    while page.locator("#t640").count() == 0:
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)
    assert "first=500#t640" in page.url
    assert complaints == []
    page.context.close()
