"""Control of cycles from their pages, the truth while it takes effect, and the pages of one cycle: log, configuration, stage."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import plotly.graph_objects as go
import pytest

from orchestrator import models as m
from orchestrator import transitions, workers
from orchestrator.launch import create_cycle
from orchestrator.persist import persist
from orchestrator.recipes import load_recipe
from orchestrator.store import Store
from orchestrator.store.logs import NewLine
from orchestrator.store.metrics import Point
from stages.domain import Phase
from stages.records import StepDone
from tests import factories
from tests.console_cycle import Seeded, seed_cycle
from tests.console_people import SignedIn, app_for, client_as
from webui.charts.stage_figures import CHARTS, smoothed, stage_figure


@pytest.fixture(scope="module")
def store(module_store: Store) -> Store:
    return module_store


@pytest.fixture(scope="module")
def lead(store: Store) -> Iterator[SignedIn]:
    with client_as(app_for(store), m.Role.LEAD, login="ada") as client:
        yield client


@pytest.fixture(scope="module")
def done(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    """A finished cycle whose RPR-1 logged everything that spec §5 asks for, one step of it alarming."""
    seeded = seed_cycle(store, tmp_path_factory.mktemp("seed"))
    stage = next(s for s in seeded.stages if s.name == "RPR-1")
    for step in range(1, 5):
        persist(store, stage, StepDone(phase=Phase.CALIBRATE, step=step, metrics=_metrics(step, actor=False)))
    for step in range(1, 13):
        persist(store, stage, StepDone(phase=Phase.JOINT, step=step, metrics=_metrics(step, actor=True)))
    payload = {"stage": "RPR-1", "phase": "joint", "step": 7, "text": "train/ratio_p99 is 4, over 3"}
    store.events.append(m.EventKind.ALARM, cycle_id=seeded.cycle.id, stage_id=stage.id, payload=payload)
    lines = [NewLine(level=20, text=f"line {i}", stage_id=stage.id if i % 2 else None) for i in range(700)]
    lines[300] = NewLine(level=40, text="Traceback <b>of the first error</b>", stage_id=stage.id)
    store.logs.append(seeded.cycle.id or 0, lines)
    return seeded


def _metrics(step: int, *, actor: bool) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        "critic/vf_explained_var": -0.5 + 0.05 * step,
        "critic/grad_norm": 30.0 / step,
        "critic/value_loss": 0.4 / step,
        "rollout/reward_mean": 0.3 + 0.01 * step,
        "rollout/success": 0.5,
        "rollout/turns_mean": 5.5,
        "rollout/tokens_mean": 80.0,
        "rollout/drift_tokens": 0.0,
    }
    if actor:
        found |= {
            "train/ratio_p99": 4.0 if step == 7 else 1.2,
            "train/ratio_max": 9.0,
            "train/clip_low_positive": 0.01,
            "train/clip_high_negative": 0.001,
            "train/ppo_kl": 0.02,
            "train/entropy": 1.1,
            "train/train_rollout_logprob_abs_diff": 1e-5,
            "actor/grad_norm": 0.7,
        }
    return found


def cycle_in(store: Store, state: m.CycleState) -> int:
    cycle = factories.cycle(store)
    assert cycle.id is not None
    if state is not m.CycleState.QUEUED:
        store.cycles.set_state(cycle.id, state)
    return cycle.id


def words(page: str) -> str:
    """What stands at the head of a cycle's page."""
    found = re.search(r'<div id="standing".*?</p>', page, re.S)
    assert found is not None
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", found.group()))


def buttons(page: str) -> set[str]:
    return set(re.findall(r'(?:action|class="button" href)="/cycles/\d+/(\w+)"', page))


# ------------------------------------------------------------------------------------------------------------ control


@pytest.mark.parametrize(
    ("state", "offered", "says"),
    [
        (m.CycleState.QUEUED, {"pause", "cancel"}, "no process works on it yet"),
        (m.CycleState.RUNNING, {"pause", "cancel"}, "sign of life"),
        (m.CycleState.PAUSING, {"resume", "cancel"}, "stops after the current wave"),
        (m.CycleState.PAUSED, {"resume", "cancel"}, "no process works on it"),
        (m.CycleState.SUSPENDED, {"pause", "cancel"}, "by itself when the quota is met"),
        (m.CycleState.RESUMING, {"pause", "cancel"}, "no process has taken it up yet"),
        (m.CycleState.CANCELLING, set(), "cannot be undone"),
        (m.CycleState.CANCELLED, set(), "stopped for good"),
        (m.CycleState.FAILED, {"resume", "cancel"}, "stopped by an error"),
        (m.CycleState.DONE, set(), "every stage is done"),
    ],
)
def test_a_page_says_what_is_true_and_offers_what_is_possible(
    store: Store, lead: SignedIn, state: m.CycleState, offered: set[str], says: str
) -> None:
    page = lead.get(f"/cycles/{cycle_in(store, state)}").text
    assert says in words(page)
    assert "since" in words(page)
    assert buttons(page) == offered


def test_pause_resume_and_cancel_of_a_running_cycle(
    store: Store, lead: SignedIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[int] = []
    monkeypatch.setattr(workers, "submit_cycle", lambda cycle_id, **_: submitted.append(cycle_id) or f"f{cycle_id}")
    cycle_id = cycle_in(store, m.CycleState.RUNNING)
    token = {"csrf": lead.csrf}
    answer = lead.post(f"/cycles/{cycle_id}/pause", data=token, follow_redirects=False)
    assert (answer.status_code, answer.headers["Location"]) == (303, f"/cycles/{cycle_id}")
    page = lead.get(f"/cycles/{cycle_id}").text
    assert "pausing" in words(page)
    assert "asked for by ada" in words(page)
    assert "Go on instead" in page
    transitions.enter(store, cycle_id, m.CycleState.PAUSED)  # the process has reached its boundary
    assert "paused since" in words(lead.get(f"/cycles/{cycle_id}").text)
    lead.post(f"/cycles/{cycle_id}/resume", data=token)
    assert store.cycles.get(cycle_id).state is m.CycleState.RESUMING
    assert submitted == [cycle_id]
    lead.post(f"/cycles/{cycle_id}/pause", data=token)  # before a process took it: at once
    assert store.cycles.get(cycle_id).state is m.CycleState.PAUSED
    assert "Cancel cycle" in lead.get(f"/cycles/{cycle_id}/cancel").text
    assert store.cycles.get(cycle_id).state is m.CycleState.PAUSED  # the page only asks
    monkeypatch.setattr(workers, "cancel_flow_run", lambda *_, **__: None)
    page = lead.post(f"/cycles/{cycle_id}/cancel", data=token).text  # a paused cycle can be cancelled
    assert "cancelled" in words(page)
    actions = [a.action for a in store.audit_trail.list(object_kind="cycle", object_id=cycle_id).items]
    assert actions == ["cycle.cancel", "cycle.pause", "cycle.resume", "cycle.pause"]


def test_what_is_refused_says_why_and_changes_nothing(store: Store, lead: SignedIn) -> None:
    token = {"csrf": lead.csrf}
    for state, verb, why in (
        (m.CycleState.DONE, "pause", "clone it to run it again"),
        (m.CycleState.CANCELLED, "resume", "clone it to run it again"),
        (m.CycleState.CANCELLING, "pause", "cannot be undone"),
        (m.CycleState.FAILED, "pause", "resume or cancel it"),
    ):
        cycle_id = cycle_in(store, state)
        answer = lead.post(f"/cycles/{cycle_id}/{verb}", data=token)
        assert answer.status_code == 409
        refused = re.search(r'id="refused">(.*?)</div>', answer.text, re.S)
        assert refused is not None
        assert why in refused.group(1)
        assert store.cycles.get(cycle_id).state is state
    assert lead.post("/cycles/999999/pause", data=token).status_code == 404
    assert lead.post(f"/cycles/{cycle_id}/explode", data=token).status_code in (404, 405, 422)
    assert lead.post(f"/cycles/{cycle_id}/cancel", data={"csrf": "x"}).status_code == 403


def test_two_leads_at_once(store: Store) -> None:
    """One pauses, one cancels, both several times: whoever comes first, the cycle ends in the stronger wish, once."""
    app = app_for(store)
    with client_as(app, m.Role.LEAD, login="ada") as ada, client_as(app, m.Role.LEAD, login="bob") as bob:
        for _ in range(3):
            cycle_id = cycle_in(store, m.CycleState.RUNNING)
            jobs = [(ada, "pause"), (bob, "cancel"), (ada, "pause"), (bob, "cancel")]
            with ThreadPoolExecutor(4) as pool:
                answers = list(
                    pool.map(lambda j: j[0].post(f"/cycles/{cycle_id}/{j[1]}", data={"csrf": j[0].csrf}), jobs)  # noqa: B023
                )
            assert {a.status_code for a in answers} <= {200, 409}
            assert answers[1].status_code == answers[3].status_code == 200
            assert store.cycles.get(cycle_id).state is m.CycleState.CANCELLING
            actions = [a.action for a in store.audit_trail.list(object_kind="cycle", object_id=cycle_id).items]
            assert actions.count("cycle.cancel") == 1
            assert actions.count("cycle.pause") <= 1


def test_only_leads_control(store: Store) -> None:
    cycle_id = cycle_in(store, m.CycleState.RUNNING)
    for role in (m.Role.REVIEWER, m.Role.ANALYST, m.Role.ADMIN):
        with client_as(store, role) as client:
            page = client.get(f"/cycles/{cycle_id}").text
            assert buttons(page) == set()
            assert "Clone" not in page
            assert client.get(f"/cycles/{cycle_id}/cancel").status_code == 404
            for verb in ("pause", "resume", "cancel"):
                assert client.post(f"/cycles/{cycle_id}/{verb}", data={"csrf": client.csrf}).status_code == 403
    assert store.cycles.get(cycle_id).state is m.CycleState.RUNNING


# ---------------------------------------------------------------------------------------------------------------- tabs


def test_log_filters_search_first_error_and_earlier_lines(lead: SignedIn, done: Seeded) -> None:
    base = f"/cycles/{done.cycle.id}/logs"

    def lines(query: str = "") -> list[str]:
        return re.findall(r"<li class=\"l\d+\">.*?<span>(.*?)</span>", lead.get(base + query).text)

    newest = lines()
    assert (len(newest), newest[-1]) == (500, "line 699")
    assert lines("?level=40") == ["Traceback &lt;b&gt;of the first error&lt;/b&gt;"]
    assert lines("?q=line+69") == ["line 69", *(f"line {i}" for i in range(690, 700))]
    stage = lines("?stage=rpr-1")
    assert stage[-1] == "line 699"
    assert all(int(text.split()[1]) % 2 for text in stage if text.startswith("line"))
    assert "No line fits" in re.sub(r"\s+", " ", lead.get(base + "?q=nothing+of+this").text)
    page = lead.get(base).text
    earlier = re.search(r'href="([^"]*before=\d+)" rel="prev"', page)
    assert earlier is not None
    older = re.findall(r"<span>(line \d+)</span>", lead.get(earlier.group(1).replace("&amp;", "&")).text)
    assert older[-1] == "line 199"
    error = re.search(r'<a href="([^"]*before=\d+)">Show what led to it', page)
    assert error is not None
    assert lead.get(error.group(1)).text.count("line 299") == 1
    assert lead.get(f"{base}?stage=rpr-9").status_code == 404


def test_configuration_against_recipe_and_parent(store: Store, lead: SignedIn) -> None:
    first = create_cycle(store, load_recipe("smoke", overrides={"seed": 3}), actor="ada")
    config = load_recipe("smoke", overrides={"seed": 4, "rpr.1.actor_lr": 1e-6})
    clone = create_cycle(store, config, actor="ada", cloned_from=first.id)
    page = lead.get(f"/cycles/{clone.id}/config").text
    parent, recipe = page.split("Against the recipe smoke")
    assert re.findall(r'<th scope="row" class="mono">([^<]*)', parent) == ["seed", "rpr.1.actor_lr"]
    assert re.findall(r'<th scope="row" class="mono">([^<]*)', recipe) == ["seed", "rpr.1.actor_lr"]
    assert '<td class="mono">2e-05</td><td class="mono">1e-06</td>' in recipe
    exact = json.loads(lead.get(f"/cycles/{clone.id}/config.json").text)
    assert exact == clone.config
    toml = lead.get(f"/cycles/{clone.id}/config.toml")
    assert toml.headers["Content-Disposition"] == f'attachment; filename="cycle-{clone.id}.toml"'
    file = Path(store.artifacts.url).parent / "again.toml"
    file.write_text(toml.text, encoding="utf-8")
    assert load_recipe(str(file)) == config
    assert tomllib.loads(toml.text)["seed"] == 4


def test_a_stage_shows_curves_health_and_what_was_kept(store: Store, lead: SignedIn, done: Seeded) -> None:
    address = f"/cycles/{done.cycle.id}/stages/rpr-1"
    page = lead.get(address).text
    keys = re.findall(r'id="chart-([\w-]+)"', page)
    assert {"ev", "reward", "ratio", "clip", "entropy", "gap", "gradients", "lengths", "turns"} <= set(keys)
    assert re.search(r"ratio, 99th percentile</th>.*?⚠ broken in 1 step: joint 7", page, re.S)
    assert "train/ratio_p99 is 4, over 3" in page
    assert re.search(r"Drifted tokens in the loss</dt><dd>0 ✓", page)
    certificates = page.partition("Consistency certificate of each step")[2].partition("</table>")[0]
    assert certificates.count("<tr>") == 1 + 16
    lengths = {}
    for key in keys:
        figure = lead.get(f"{address}/charts/{key}.json").json()
        go.Figure(figure)  # raises on anything that Plotly does not know
        assert figure["layout"]["uirevision"] == "keep"
        lengths[key] = {len(trace["x"]) for trace in figure["data"]}
        assert figure["layout"]["shapes"][0]["type"] == "rect"  # calibration is marked
    assert lengths["ev"] == lengths["ratio"] == {16}  # one x axis for all
    figure = lead.get(f"{address}/charts/ratio.json?smooth=5&scale=log").json()
    assert figure["layout"]["yaxis"]["type"] == "log"
    stored = store.metrics.curve(["train/ratio_p99"], cycle_id=done.cycle.id)
    raw, line = figure["data"][:2]
    assert [y for y in raw["y"] if y is not None] == [p.value for p in stored]
    assert line["hoverinfo"] == "skip"
    assert raw["y"][:4] == [None] * 4  # calibration has no ratio, and none is invented
    assert lead.get(f"/cycles/{done.cycle.id}/stages/nope").status_code == 404
    assert lead.get(f"{address}/charts/nope.json").status_code == 404
    assert "makes no optimiser step" in lead.get(f"/cycles/{done.cycle.id}/stages/base").text


def test_smoothing_keeps_constants_and_gaps() -> None:
    assert smoothed([2.0, None, 2.0, 2.0], 5) == pytest.approx([2.0, None, 2.0, 2.0])
    line = smoothed([0.0] * 5 + [1.0] * 50, 10)
    assert line[4] == 0.0
    assert 0 < (line[6] or 0) < (line[20] or 0) <= 1.0


def test_a_long_stage_is_thinned_and_says_so() -> None:
    def point(step: int) -> Point:
        return Point(
            stage_id=1, stage="RPR-1", arm="main", phase=Phase.JOINT, step=step, name="rollout/reward_mean", value=1.0
        )

    figure = stage_figure(CHARTS["reward"], [point(i) for i in range(1, 5002)])
    assert len(figure["data"][0]["x"]) <= 2001
    assert "of 5001 points shown" in figure["layout"]["xaxis"]["title"]["text"]


# --------------------------------------------------------------------------------------------------- inbox, overview


def test_the_inbox_counts_and_marks_ones_own(store: Store) -> None:
    app = app_for(store)
    with (
        client_as(app, m.Role.REVIEWER, login="rev") as reviewer,
        client_as(app, m.Role.REVIEWER, login="roy") as other,
    ):
        cycle_id = cycle_in(store, m.CycleState.RUNNING)
        transitions.enter(store, cycle_id, m.CycleState.SUSPENDED)
        page = reviewer.get("/inbox").text
        assert f"cycle {cycle_id}" in page
        assert re.search(r'href="/inbox"[^>]*>Inbox <span class="count">\(1\)', page)
        board = reviewer.get("/").text
        assert re.search(r"Needs you</h2>.*wait for a verdict", board, re.S)
        notice = re.search(r'name="notice" value="(\d+)"', page)
        assert notice is not None
        assert reviewer.post("/inbox/read", data={"csrf": reviewer.csrf, "notice": notice.group(1)}).status_code == 200
        assert 'class="count"' not in re.sub(r".*(Inbox.*?</li>).*", r"\1", reviewer.get("/cycles").text, flags=re.S)
        assert "(1)" in other.get("/cycles").text
        other.post("/inbox/read", data={"csrf": other.csrf})
        assert "0 unread" in other.get("/inbox").text
        assert other.post("/inbox/read", data={"csrf": other.csrf, "notice": "9" * 30}).status_code == 200


def test_the_overview_says_what_needs_a_lead(store: Store, lead: SignedIn) -> None:
    cycle_id = cycle_in(store, m.CycleState.RUNNING)
    transitions.enter(store, cycle_id, m.CycleState.FAILED, error="the <disk> is full")
    board = lead.get("/").text
    needs_you = board.split("Needs you")[1].split("</section>")[0]
    assert f"cycle {cycle_id}" in needs_you
    assert "the &lt;disk&gt; is full" in needs_you
    assert "New cycle" in board
    with client_as(store, m.Role.ANALYST) as analyst:
        page = analyst.get("/").text
        assert "Needs you" not in page
        assert "Needs somebody" in page
        assert "New cycle" not in page
