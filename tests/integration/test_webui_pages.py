"""The console's pages against a real store: contract, escaping, fragments, headers, errors, empty states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go
import pytest
from fastapi.testclient import TestClient

from orchestrator import models as m
from orchestrator.store import Store
from tests.console_cycle import HOSTILE, RATES, Seeded, evaluation, seed_cycle, stretch_times
from tests.console_people import app_for, client_as
from webui.sign_in import COOKIE

TEACHES = {"/": "Nothing has run yet", "/cycles": "No cycle yet", "/checkpoints": "No checkpoint yet"}
TEACHES |= {"/lineage": "No checkpoint yet", "/trajectories": "No attempt yet"}


@pytest.fixture(scope="module")
def world(module_store: Store, module_folder: Path) -> tuple[Store, Seeded, Seeded]:
    """One finished and one running cycle, only read by these tests."""
    store, folder = module_store, module_folder
    done = seed_cycle(store, folder)
    running = seed_cycle(store, folder, name="second <b>seed</b>", until=2, running=True, offset=2_000_000)
    for seeded in (done, running):
        stretch_times(store, seeded.cycle.id or 0)
    return store, done, running


@pytest.fixture(scope="module")
def client(world: tuple[Store, Seeded, Seeded]) -> Iterator[TestClient]:
    with client_as(world[0]) as opened:
        yield opened


@pytest.fixture(scope="module")
def addresses(world: tuple[Store, Seeded, Seeded]) -> list[str]:
    _, done, running = world
    return [
        "/",
        "/cycles",
        "/cycles?state=live",
        "/cycles?q=nothing+fits",
        f"/cycles/{done.cycle.id}",
        f"/cycles/{running.cycle.id}",
        f"/cycles/{running.cycle.id}/logs?level=30&q=slow",
        f"/cycles/{running.cycle.id}/config",
        f"/cycles/{done.cycle.id}/stages/rpr-1?smooth=5&scale=log",
        f"/cycles/{done.cycle.id}/stages/rsr-1",
        "/checkpoints",
        f"/checkpoints?cycle={done.cycle.id}&candidates=1",
        "/checkpoints/1",
        "/checkpoints/4",
        "/lineage",
        f"/lineage?cycle={done.cycle.id}",
        "/lineage?checkpoint=5",
        "/trajectories",
        "/trajectories?verdict=failed&phase=joint&stratum=medium&end=turn_cap&task=&family=",
        "/trajectories?flagged=1",
        "/trajectories?gate=1&costly=1",
        f"/trajectories/{done.hostile_id}",
        f"/trajectories/{done.hostile_id}?q=zuko",
        f"/trajectories/{done.long_id}?first=500",
        "/nothing/here",
    ]


# --------------------------------------------------------------------------------------------------- whole, and quiet


def test_every_page_answers_with_a_whole_document(client: TestClient, addresses: list[str]) -> None:
    for address in addresses:
        answer = client.get(address)
        assert answer.status_code == (404 if address == "/nothing/here" else 200), address
        assert answer.text.lstrip().startswith("<!doctype html>")
        assert answer.text.count("<h1>") == 1
        assert "HX-Request" in answer.headers["Vary"]


# ------------------------------------------------------------------------------------------------------------- security


def test_no_text_of_a_model_or_task_becomes_markup(client: TestClient, addresses: list[str]) -> None:
    shown = 0
    for address in addresses:
        html = client.get(address).text
        assert "<script>alert" not in html, address
        assert "<img src=x" not in html, address
        assert "<b>seed</b>" not in html, address
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", html), address
        shown += html.count("&lt;script&gt;alert")
    assert shown >= 4  # the command, its observation, the runbook line, the verifier's log


def test_nothing_inline_and_nothing_from_outside(client: TestClient, addresses: list[str]) -> None:
    for address in addresses:
        answer = client.get(address)
        html = answer.text
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert not re.findall(r"<script(?![^>]* src=)", html), address
        assert "<style" not in html
        assert not re.findall(
            r"\s(?:style|on[a-z]+)=", re.sub(r"<(pre|code|li|td|span)[^>]*>.*?</\1>", "", html, flags=re.S)
        )
        for link in re.findall(r'(?:href|src|action|hx-get|hx-sse:connect|data-src)="([^"]*)"', html):
            assert link.startswith(("/", "#")), (address, link)


# ------------------------------------------------------------------------------------------------------------ fragments


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/cycles/1", "standing"),
        ("/cycles/1", "cost"),
        ("/cycles/1", "strip"),
        ("/cycles/1", "scores"),
        ("/cycles/1", "ev"),
        ("/cycles/1", "success"),
        ("/cycles/1", "stages"),
        ("/cycles", "rows"),
        ("/checkpoints", "rows"),
        ("/lineage", "graph"),
        ("/", "board"),
    ],
)
def test_a_fragment_is_a_part_of_its_page(client: TestClient, path: str, target: str) -> None:
    headers = {"HX-Request": "true", "HX-Target": f"div#{target}"}
    part = client.get(path, headers=headers).text.strip()
    assert part.startswith("<")
    assert f'id="{target}"' in part.split(">", 1)[0]
    assert "<!doctype" not in part

    def without_ages(html: str) -> str:
        return re.sub(r"\d[\d.]* (?:s|m|h|d)(?: \d+ [smh])? ago|after=\d+|v=\w+", "", html)

    assert without_ages(part) in without_ages(client.get(path).text)


def test_an_unknown_target_gets_the_page(client: TestClient) -> None:
    answer = client.get("/cycles", headers={"HX-Request": "true", "HX-Target": "div#zzz"})
    assert "<!doctype html>" in answer.text


# ---------------------------------------------------------------------------------------------------------------- facts


def test_the_cycle_page_states_scores_with_their_evidence(
    client: TestClient, world: tuple[Store, Seeded, Seeded]
) -> None:
    store, done, _ = world
    html = client.get(f"/cycles/{done.cycle.id}").text
    for measured in store.evaluations.list(cycle_id=done.cycle.id).items:
        assert f"({measured.passed}/{measured.verdicts})" in html
        rate = f"{100 * measured.passed / measured.verdicts:.1f} %"
        assert re.search(rf"{rate} <span class=\"kn\">\({measured.passed}/{measured.verdicts}\)</span>", html)
    assert len(re.findall(r"\[\d+\.\d, \d+\.\d\]", html)) >= 10
    for name in RATES:
        assert html.count(f">{name}<") >= 2
    assert "Δφ = 0 ✓" in html
    assert "no critic yet" in html
    assert "parent 50/160, last 80/160" in html


def test_columns_that_cannot_be_compared_are_flagged(store: Store, tmp_path: Path) -> None:
    seeded = seed_cycle(store, tmp_path, until=2)
    with client_as(store) as opened:
        page = f"/cycles/{seeded.cycle.id}"
        assert "differ</span>" not in opened.get(page).text
        checkpoint = store.checkpoints.named(seeded.cycle.id, "RSR-1")
        assert checkpoint is not None
        larger = evaluation("RSR-1", "heldout-names", 0.5, tasks=60)
        store.evaluations.save(larger, cycle_id=seeded.cycle.id, checkpoint_id=checkpoint.id)
        assert "denominators differ</span>" in opened.get(page).text


def test_a_rewrite_stage_proves_its_critic(client: TestClient) -> None:
    html = client.get("/checkpoints/4").text  # RSR-2
    assert "Δφ = 0 verified" in html
    assert html.count("2c" * 32) == 2  # before and after
    assert "Δφ = 0 ✓</text>" in html
    trained = client.get("/checkpoints/5").text
    assert "Δφ ≠ 0: the critic was trained" in trained
    assert "no critic yet" in client.get("/checkpoints/2").text


def test_missing_is_a_dash_and_never_zero(client: TestClient, world: tuple[Store, Seeded, Seeded]) -> None:
    _, done, _ = world
    html = client.get(f"/cycles/{done.cycle.id}").text
    row = re.search(r"<td>RPR-1</td><td>joint</td><td[^>]*>2</td><td[^>]*>([^<]*)</td>", html)
    assert row is not None
    assert row.group(1) == "—"


def test_trajectory_filters_narrow(client: TestClient, world: tuple[Store, Seeded, Seeded]) -> None:
    _, done, _ = world

    def shown(query: str) -> str:
        return client.get(f"/trajectories?{query}").text

    assert "failed" not in re.findall(r'class="state s-(\w+)"', shown("verdict=passed"))
    assert "passed" not in re.findall(r'class="state s-(\w+)"', shown("verdict=failed"))
    assert 'href="/trajectories/' + done.hostile_id in shown("flagged=1")
    assert "No attempt fits" in shown("task=does-not-exist")
    first = shown(f"cycle={done.cycle.id}")
    after = re.search(r'href="(/trajectories\?[^"]*before=\d+[^"]*)" rel="next"', first)
    assert after is not None
    second = client.get(after.group(1).replace("&amp;", "&")).text
    ids = [set(re.findall(r'href="/trajectories/([0-9a-f]{24})"', page)) for page in (first, second)]
    assert len(ids[0]) == len(ids[1]) == 50
    assert not ids[0] & ids[1]


def test_trajectory_page_has_turns_folds_and_permalinks(
    client: TestClient, world: tuple[Store, Seeded, Seeded]
) -> None:
    _, done, _ = world
    html = client.get(f"/trajectories/{done.hostile_id}").text
    for turn in range(4):
        assert f'id="t{turn}"' in html
        assert f'href="#t{turn}"' in html
    assert re.search(r'<details class="fold" data-fold="t0" open>', html)
    assert re.search(r'<details class="fold" data-fold="t1"><summary>401 lines', html)
    assert "segment 1: new prompt" in html
    assert "timed out" in html
    assert "soft · artifact.read-value" in html
    assert "^[[31mred" in html  # the escape code is shown, not sent
    assert HOSTILE[:8] not in html
    found = client.get(f"/trajectories/{done.hostile_id}?q=zuko").text
    assert "1 turn<" in found
    assert re.search(r'class="turn cited hit" id="t2"', found)
    long = client.get(f"/trajectories/{done.long_id}").text
    assert 'id="t499"' in long
    assert 'id="t500"' not in long
    assert "500–699" in long


def test_log_is_downloaded_whole(client: TestClient, world: tuple[Store, Seeded, Seeded]) -> None:
    _, done, _ = world
    answer = client.get(f"/cycles/{done.cycle.id}/log.txt")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert "attachment" in answer.headers["Content-Disposition"]
    lines = answer.text.splitlines()
    assert len(lines) == 61
    assert lines[-1].endswith("slow sandbox <b>17 s</b>")
    warnings = client.get(f"/cycles/{done.cycle.id}/logs?level=30").text
    assert warnings.count('<li class="l') == 1


@pytest.mark.parametrize("name", ["ev", "success"])
def test_charts_are_valid_figures_of_the_stored_values(
    client: TestClient, world: tuple[Store, Seeded, Seeded], name: str
) -> None:
    store, done, _ = world
    figure = client.get(f"/cycles/{done.cycle.id}/charts/{name}.json").json()
    go.Figure(figure)  # raises on anything that Plotly does not know
    assert figure["layout"]["uirevision"] == "keep"
    drawn = [y for trace in figure["data"] for y in trace["y"]]
    if name == "ev":
        stored = [p.value for p in store.metrics.curve(["critic/vf_explained_var"], cycle_id=done.cycle.id)]
        assert drawn == stored
        assert None in drawn
    calibration = [t for t in figure["data"] if t["marker"]["symbol"] == "diamond-open"]
    assert [len(t["y"]) for t in calibration] == [4, 4]
    assert len([s for s in figure["layout"]["shapes"] if s["type"] == "rect"]) == 2
    html = client.get(f"/cycles/{done.cycle.id}").text
    assert f"Table ({len(drawn)} rows)" in html


# ---------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/cycles/999", 404, "There is no cycle 999"),
        ("/cycles/abc", 404, "There is no such page"),
        ("/cycles/99999999999999999999", 422, "cannot be understood"),
        ("/checkpoints/999", 404, "There is no checkpoint 999"),
        ("/lineage?checkpoint=999", 404, "There is no checkpoint 999"),
        ("/trajectories/zzz", 404, "There is no trajectory zzz"),
        ("/trajectories?verdict=great", 422, "it is one of passed, failed"),
        ("/trajectories?cycle=x", 422, "cycle"),
        ("/cycles/1/charts/zzz.json", 404, "There is no chart zzz"),
        ("/cycles/1/logs?level=99", 422, "level"),
        ("/cycles?q=a%00b", 422, "NUL"),
        ("/trajectories/a%00b", 422, "NUL"),
        ("/trajectories?before=99999999999999999999", 422, "before"),
        ("/events?cycle=x", 422, "cycle"),
    ],
)
def test_errors_say_what_is_wrong(client: TestClient, path: str, status: int, words: str) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert words in answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("query", "to"),
    [("1", "/cycles/1"), ("1/RPR-1", "/checkpoints/3"), ("3a3a3a3a3a", "/checkpoints/4"), ("zzz?", "/cycles?q=zzz%3F")],
)
def test_jump_leads_somewhere(client: TestClient, query: str, to: str) -> None:
    answer = client.get("/jump", params={"q": query}, follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["Location"] == to


def test_empty_pages_teach(store: Store) -> None:
    with client_as(store) as empty:
        for path, words in TEACHES.items():
            html = empty.get(path).text
            assert words in html, path
            assert "rsi cycle launch demo" in html
        assert empty.get("/healthz").json() == {"status": "ok", "database": "ok"}


def test_a_failed_and_a_suspended_cycle_need_somebody(store: Store, tmp_path: Path) -> None:
    failed = seed_cycle(store, tmp_path, name="broken", until=1, running=True)
    store.cycles.set_state(failed.cycle.id or 0, m.CycleState.FAILED, error="the disk is full")
    gated = seed_cycle(store, tmp_path, name="gated", until=2, running=True, offset=4_000_000)
    store.cycles.set_state(gated.cycle.id or 0, m.CycleState.SUSPENDED)
    store.runbooks.set_state(gated.runbook_id, 1, m.RunbookState.WAITING)
    with client_as(store) as opened:
        html = opened.get("/").text
        assert "the disk is full" in html
        assert "1 runbook waits for a verdict" in re.sub(r"\s+", " ", html)
        page = opened.get(f"/cycles/{failed.cycle.id}").text
        assert "Stopped by an error." in page


def test_a_lost_database_is_said_and_not_a_crash(database_url: str, tmp_path: Path) -> None:
    gone = Store.open(database_url.replace("test_", "gone_"), tmp_path / "artifacts")
    with TestClient(app_for(gone)) as opened:
        opened.cookies.set(COOKIE, opened.app.state.keys.cookie("anything"))  # type: ignore[attr-defined]
        answer = opened.get("/cycles")
        assert answer.status_code == 503
        assert "The database does not answer" in answer.text
        health = opened.get("/healthz")
        assert health.status_code == 200  # the process is well; restarting it would not help
        assert "cannot be used" in health.json()["database"]
    gone.close()
