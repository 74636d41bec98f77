"""A research lead's day in a real Chromium: launch through the form, clone, watch a stage, pause, resume, cancel; with and
without a script. The cycle that really runs is in the test marked `full`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import models as m
from orchestrator import transitions
from orchestrator.embedded import control, database
from orchestrator.persist import persist
from orchestrator.store import Store
from stages.domain import Phase
from stages.records import StepDone
from tests.chromium import MARKS
from tests.console_cycle import Seeded, seed_cycle, stretch_times
from tests.console_people import cookie_for, person
from tests.console_server import serving

pytestmark = MARKS


@pytest.fixture(scope="module")
def house(module_store: Store, module_folder: Path) -> Iterator[tuple[Store, str, Seeded, Seeded]]:
    store, folder = module_store, module_folder
    person(store, m.Role.LEAD, login="ada")  # first: the finished cycle is told to her
    done = seed_cycle(store, folder)
    running = seed_cycle(store, folder, name="live", until=2, running=True, offset=2_000_000)
    for seeded in (done, running):
        stretch_times(store, seeded.cycle.id or 0)
        for step in range(1, 9):
            persist(store, seeded.stages[2], StepDone(phase=Phase.JOINT, step=step, metrics=metrics(step)))
    with serving(store) as base:
        yield store, base, done, running


def metrics(step: int) -> dict[str, float | None]:
    return {
        "critic/vf_explained_var": 0.1 * step - 0.4,
        "critic/grad_norm": 40 / step,
        "actor/grad_norm": 0.5,
        "rollout/reward_mean": 0.2 + 0.03 * step,
        "train/ratio_p99": 1.1 if step != 6 else 4.2,
        "train/ratio_max": 3.0 + step,
        "train/ppo_kl": 0.01,
        "train/entropy": 1.0 - 0.05 * step,
        "train/train_rollout_logprob_abs_diff": 1e-4,
        "rollout/tokens_mean": 80.0 + step,
        "rollout/turns_mean": 5.0,
        "rollout/drift_tokens": 0.0,
    }


def signed_in(browser: Any, store: Store, base: str, **options: object) -> tuple[Any, list[str]]:
    """A page of the lead ada, and what it complained about."""
    context = browser.new_context(**options)
    context.add_cookies([{**cookie_for(store, "ada"), "url": base}])
    context.set_default_timeout(20_000)
    page = context.new_page()
    said: list[str] = []
    page.on("request", lambda r: said.append(r.url) if not r.url.startswith((base, "data:")) else None)
    page.on("pageerror", lambda e: said.append(str(e)))
    page.on("console", lambda c: said.append(c.text) if c.type in ("error", "warning") else None)
    return page, said


def until(page: Any, expression: str, seconds: float = 20) -> None:
    """Wait until the expression is true. (Playwright's own wait uses eval, which the page's policy forbids.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not within {seconds} s: {expression}"
        page.wait_for_timeout(100)


def test_names_fit_their_boxes(browser: Any, house: tuple[Store, str, Seeded, Seeded], tmp_path: Path) -> None:
    store, base, done, _ = house
    critic = m.Checkpoint(
        cycle_id=done.cycle.id, name="RPR-1 seed critic", actor_digest="ab" * 32, critic_digest="cd" * 32
    )
    store.checkpoints.save(critic)
    page, said = signed_in(browser, store, base)
    page.goto(f"{base}/lineage")
    over = """[...document.querySelectorAll('.dag .node')].filter(n => {
        const box = n.querySelector('.box').getBoundingClientRect();
        return [...n.querySelectorAll('text')].some(t => t.getBoundingClientRect().right > box.right - 3);
    }).map(n => n.textContent)"""
    assert "RPR-1 seed critic" in page.content()
    assert page.evaluate(over) == []
    assert said == []
    page.context.close()


def test_launch_through_the_form(browser: Any, house: tuple[Store, str, Seeded, Seeded], submitted: list[int]) -> None:
    store, base, *_ = house
    page, said = signed_in(browser, store, base)
    page.goto(base)
    page.locator("text=New cycle").first.click()
    page.locator(".choices a >> text=smoke").click()
    page.fill("[name=name]", "by the form")
    page.locator("#f-rpr\\.0 > summary").click()
    before = page.locator("#plan td.num").nth(1).inner_text()
    page.fill("[name='rpr.0.joint_steps']", "3")
    page.locator("[name='rpr.0.joint_steps']").press("Tab")
    page.wait_for_selector("#plan th:text('rpr.0.joint_steps')")  # the estimate and the diff follow by themselves
    assert page.locator("#plan td.num").nth(1).inner_text() != before
    assert page.input_value("[name='rpr.0.joint_steps']") == "3"
    page.fill("[name='rpr.0.global_batch_size']", "9999")
    page.locator("button.primary").click()
    assert "nothing was created" in page.locator("#problems").inner_text()
    page.locator("#problems a").first.click()
    assert page.evaluate("document.activeElement.getAttribute('aria-invalid')") == "true"
    assert "at least global_batch_size" in page.locator(".field.wrong").inner_text()
    assert submitted == []
    page.fill("[name='rpr.0.global_batch_size']", "16")
    page.locator("button.primary").click()
    page.wait_for_selector("h1:has-text('by the form')")
    cycle = store.cycles.list(limit=1).items[0]
    assert (cycle.created_by, cycle.config["rpr"][0]["joint_steps"], submitted) == ("ada", 3, [cycle.id])
    assert "queued" in page.locator("#standing").inner_text()
    page.locator("text=Clone…").click()
    assert "would repeat cycle" in page.locator("#plan").inner_text()
    assert [s for s in said if "422" not in s] == []  # the browser itself notes the refused form
    page.context.close()


def test_the_words_follow_while_a_wish_takes_effect(
    browser: Any, house: tuple[Store, str, Seeded, Seeded], submitted: list[int]
) -> None:
    store, base, _, running = house
    cycle_id = running.cycle.id or 0
    page, said = signed_in(browser, store, base)
    page.goto(f"{base}/cycles/{cycle_id}")
    page.locator("#standing button >> text=Pause").click()
    page.wait_for_selector("#standing >> text=pausing")
    assert "stops after the current wave" in page.locator("#standing").inner_text()
    transitions.enter(store, cycle_id, m.CycleState.PAUSED)  # the process reached its boundary
    page.wait_for_selector("#standing >> text=no process works on it")  # without a reload
    page.locator("#standing button >> text=Resume").click()
    page.wait_for_selector("#standing >> text=resuming")
    assert submitted == [cycle_id]
    transitions.enter(store, cycle_id, m.CycleState.RUNNING)
    page.wait_for_selector("#standing >> text=sign of life")
    assert said == []
    page.context.close()


def test_one_crosshair_one_zoom_and_both_survive_an_update(
    browser: Any, house: tuple[Store, str, Seeded, Seeded]
) -> None:
    store, base, _, running = house
    page, said = signed_in(browser, store, base, viewport={"width": 1280, "height": 1600})
    page.goto(f"{base}/cycles/{running.cycle.id}/stages/rpr-1")
    for key in ("ev", "reward", "turns"):
        page.wait_for_selector(f"#chart-{key} .main-svg")
    page.wait_for_timeout(300)
    point = page.locator("#chart-reward .points path").nth(3)
    point.hover(force=True)
    page.wait_for_selector("#chart-ev .hoverlayer .hovertext")
    assert (page.locator("#chart-ev .hoverlayer").text_content() or "").startswith("joint 4")
    page.evaluate("Plotly.relayout('chart-reward', {'xaxis.range[0]': 1, 'xaxis.range[1]': 5})")
    ranges = "['ev','reward','turns'].map(k => document.getElementById('chart-'+k)._fullLayout.xaxis.range.map(Math.round).join())"
    until(page, f"{ranges}.every(r => r === '1,5')")
    persist(store, running.stages[2], StepDone(phase=Phase.JOINT, step=13, metrics=metrics(13)))
    until(page, "document.getElementById('chart-reward').data[0].x.length === 17")
    assert page.evaluate(ranges) == ["1,5"] * 3
    page.locator("text=20 steps").click()
    page.wait_for_selector("#chart-turns .main-svg")
    assert "smooth=20" in page.url
    assert said == []
    page.context.close()


def test_everything_works_without_a_script(
    browser: Any, house: tuple[Store, str, Seeded, Seeded], submitted: list[int]
) -> None:
    store, base, done, _ = house
    page, _ = signed_in(browser, store, base, java_script_enabled=False)
    page.goto(f"{base}/cycles/new?recipe=smoke")
    page.fill("[name=name]", "no script")
    page.fill("[name=seed]", "minus one")
    page.locator("button >> text=Check").click()
    assert "cannot be used" in page.locator("#problems").inner_text()
    page.fill("[name=seed]", "5")
    page.locator("button >> text=Check").click()
    assert "seed" in page.locator("#plan .diff").inner_text()
    page.locator("button.primary").click()
    cycle = store.cycles.list(limit=1).items[0]
    assert (cycle.name, cycle.seed, submitted) == ("no script", 5, [cycle.id])
    page.locator("#standing button >> text=Pause").click()
    assert "paused" in page.locator("#standing").inner_text()
    page.locator("#standing >> text=Cancel").click()
    page.locator("button >> text=for good").click()
    assert "cancelled" in page.locator("#standing").inner_text()
    page.goto(f"{base}/cycles/{done.cycle.id}/stages/rpr-1")
    page.locator("section:has(#chart-reward) summary").click()
    assert page.locator("section:has(#chart-reward) tbody tr").count() == 8
    page.context.close()


@pytest.mark.full
def test_a_cycle_that_really_runs_is_launched_paused_resumed_and_done(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The installation's own Postgres, Prefect, worker and console; the smoke recipe with a human gate left out."""
    from tests.integration.services_kit import OTHER_INSTALLATIONS, nothing_is_left, settings_of

    settings = settings_of(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        for name in OTHER_INSTALLATIONS:
            patch.delenv(name, raising=False)
        control.up(settings)
        store = Store.open(database.url(settings), settings.artifacts)
        try:
            person(store, m.Role.LEAD, login="ada")
            base = f"http://127.0.0.1:{settings.console_port}"
            context = browser.new_context()
            context.add_cookies([{**real_cookie(store, settings), "url": base}])
            context.set_default_timeout(60_000)
            page = context.new_page()
            page.goto(f"{base}/cycles/new?recipe=smoke")
            page.locator("button.primary").click()
            page.wait_for_selector("#standing >> text=sign of life", timeout=90_000)
            page.locator("#standing button >> text=Pause").click()
            page.wait_for_selector("#standing >> text=no process works on it", timeout=90_000)
            cycle_id = store.cycles.list(limit=1).items[0].id or 0
            assert store.cycles.get(cycle_id).state is m.CycleState.PAUSED
            page.locator("#standing button >> text=Resume").click()
            page.wait_for_selector("#standing >> text=every stage is done", timeout=240_000)
            assert [s.state for s in store.stages.of_cycle(cycle_id)] == [m.StageState.DONE] * 5
            page.goto(f"{base}/inbox")
            assert f"(cycle {cycle_id}) is done" in page.locator("main").inner_text()
            page.goto(f"{base}/cycles/{cycle_id}/stages/rpr-1")
            page.wait_for_selector("#chart-ev .main-svg")
            assert "0 ✓" in page.locator("#health").inner_text()
            context.close()
        finally:
            store.close()
            assert control.down(settings)
            nothing_is_left(settings)


def real_cookie(store: Store, settings: Any) -> dict[str, str]:
    from webui.sign_in import COOKIE, Keys

    user = store.users.named("ada")
    assert user is not None
    return {"name": COOKIE, "value": Keys.of(settings).cookie(store.sign_ins.open(user.id or 0, "test"))}
