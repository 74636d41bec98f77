"""The analyst's pages: comparison, tasks, token view, reward audits, suspicious passes, analysis of a cycle."""

from __future__ import annotations

import csv
import html
import io
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest
from sqlalchemy import text

from orchestrator import audit_jobs
from orchestrator.comparison_rows import comparison_rows, score_rows
from orchestrator.comparisons import compare_checkpoints
from orchestrator.persist import persist_many
from orchestrator.store import Store
from stages.domain import FamilyScale, Phase, Verdict
from stages.records import AttemptFinished, EvaluationDone
from tests import factories
from tests.analysis_world import Analysed, seed_analysis
from tests.console_cycle import SUITES, evaluation, seed_cycle
from tests.console_people import SignedIn, client_as

from orchestrator.models import Role  # isort: skip

VIEWS = ("scores", "matrix", "strata", "curves", "config", "cost", "selection")
TABLES = ("scores", "differences", "matrix", "strata", "families", "categories", "config", "cost")


@pytest.fixture(scope="module")
def world(module_store: Store, module_folder: Path) -> Analysed:
    return seed_analysis(module_store, module_folder)


@pytest.fixture(scope="module")
def client(world: Analysed) -> Iterator[SignedIn]:
    with client_as(world.store) as opened:
        opened.follow_redirects = False
        yield opened


def ids(world: Analysed) -> str:
    return ",".join(str(c.id) for c in world.checkpoints)


def rows_of(answer_text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(answer_text)))


# ------------------------------------------------------------------------------------------------------------- compare


def test_every_view_is_a_whole_page_without_markup_of_others(world: Analysed, client: SignedIn) -> None:
    for view in VIEWS:
        answer = client.get(f"/compare?c={ids(world)}&suite={SUITES[0]}&view={view}&every=1")
        assert answer.status_code == 200, view
        assert answer.text.count("<h1>") == 1
        assert f'aria-current="page">{view}</a>' in answer.text
        assert not re.findall(r"<script(?![^>]* src=)|<style|\sstyle=", answer.text)


def test_scores_and_differences_stand_on_the_page_and_in_the_csv(world: Analysed, client: SignedIn) -> None:
    """Every k/n, interval and difference of the page is the report's, and the CSV holds the same with every digit."""
    page = html.unescape(client.get(f"/compare?c={ids(world)}&suite={SUITES[0]}").text)
    report = compare_checkpoints(world.store, ids(world).split(","), suite=SUITES[0]).suites[0]
    scores = rows_of(client.get(f"/compare/scores.csv?c={ids(world)}&suite={SUITES[0]}").text)
    assert [int(r["passed"]) for r in scores] == [r["passed"] for r in score_rows(report)]
    for row, want in zip(scores, score_rows(report), strict=True):
        assert float(row["rate_verdicts"]) == want["rate_verdicts"]
        shown = f"{100 * want['rate_verdicts']:.1f} % ({want['passed']}/{want['verdicts']})"
        assert shown in re.sub(r"<[^>]+>", "", page)
        assert f"[{100 * want['verdicts_low']:.1f}, {100 * want['verdicts_high']:.1f}]" in page
    differences = rows_of(client.get(f"/compare/differences.csv?c={ids(world)}&suite={SUITES[0]}").text)
    assert len(differences) == 4
    for row, want in zip(differences, comparison_rows(report), strict=True):
        assert float(row["difference"]) == want["difference"]
        assert f"{100 * want['difference']:+.1f} pp".replace("-", "−") in page
        assert f"▲ {want['improved']}" in page
        assert f"▼ {want['worsened']}" in page
    assert "k / attempts (leaderboard)" in page
    assert "first · any · all of k" in page


def test_the_base_is_the_readers_choice(world: Analysed, client: SignedIn) -> None:
    first, last = world.checkpoints[0].id, world.checkpoints[-1].id
    up = rows_of(client.get(f"/compare/differences.csv?c={first},{last}&suite={SUITES[0]}").text)[0]
    down = rows_of(client.get(f"/compare/differences.csv?c={last},{first}&suite={SUITES[0]}").text)[0]
    assert float(up["difference"]) == -float(down["difference"])
    assert (up["improved"], up["worsened"]) == (down["worsened"], down["improved"])


def test_the_matrix_shows_flips_with_sign_and_link(world: Analysed, client: SignedIn) -> None:
    base, other = world.checkpoints[0], world.checkpoints[4]
    report = compare_checkpoints(world.store, [str(base.id), str(other.id)], suite=SUITES[0]).suites[0]
    (compared,) = report.comparisons
    address = f"/compare?c={base.id},{other.id}&suite={SUITES[0]}&view=matrix"
    flips = client.get(f"{address}&flips=1").text
    assert flips.count("<tr>") - 1 == len(compared.improved) + len(compared.worsened)
    assert flips.count('class="num rose"') == len(compared.improved)
    assert flips.count('class="num fell"') == len(compared.worsened)
    task = compared.improved[0]
    assert f'href="/tasks/{SUITES[0]}/{task}?checkpoint={other.id}#c{other.id}">▲ ' in flips
    every = client.get(address).text
    assert every.count("<tr>") - 1 == 40
    exported = rows_of(client.get(f"/compare/matrix.csv?c={base.id},{other.id}&suite={SUITES[0]}").text)
    assert sum(r["change"] == "1" for r in exported) == len(compared.improved)


def test_every_table_exports(world: Analysed, client: SignedIn) -> None:
    for table in TABLES:
        answer = client.get(f"/compare/{table}.csv?c={ids(world)}&suite={SUITES[0]}")
        assert answer.status_code == 200
        assert answer.headers["content-disposition"] == f'attachment; filename="compare-{table}.csv"'
        assert len(rows_of(answer.text)) >= 3, table
    assert client.get(f"/compare/people.csv?c={ids(world)}").status_code == 404
    assert client.get("/compare/scores.csv?c=1,x").status_code == 422


def test_figures_are_what_plotly_takes(world: Analysed, client: SignedIn) -> None:
    for name in ("chart.json", "curves.json", "curves.json?smooth=3&scale=log"):
        path, _, more = name.partition("?")
        figure = client.get(f"/compare/{path}?c={ids(world)}&suite={SUITES[0]}&{more}").json()
        go.Figure(figure)
        assert figure["data"]
    curve = client.get(f"/compare/curves.json?c={ids(world)}&suite={SUITES[0]}").json()
    rpr_1 = next(d for d in curve["data"] if d["name"] == "RPR-1")
    assert rpr_1["x"][:5] == [-3, -2, -1, 0, 1]  # four calibration updates, then the first joint one
    assert rpr_1["y"][5] is None  # joint step 2 has no EV: a gap, not 0


def test_the_picker_needs_no_script_and_says_what_is_wrong(world: Analysed, client: SignedIn) -> None:
    picker = client.get("/compare").text
    assert picker.count('type="checkbox"') == 5
    one, two = world.checkpoints[0].id, world.checkpoints[1].id
    answer = client.get(f"/compare?go=1&c=&c={one}&c={two}")
    assert answer.status_code == 303
    assert answer.headers["location"] == f"/compare?c={one},{two}"
    named = client.get(f"/compare?go=1&c={world.seeded.cycle.id}/Base,{two}")
    assert named.headers["location"] == f"/compare?c={one},{two}"
    for wrong, why in (("go=1&c=99999", "names-error"), (f"go=1&c={one}", "at least two"), ("go=1&c=", "at least two")):
        refused = client.get(f"/compare?{wrong}")
        if wrong != "go=1&c=":
            assert refused.status_code == 422
            assert why in refused.text
        else:
            assert refused.status_code == 200  # nothing was asked yet
    assert client.get(f"/compare?c={one},{two}&suite=nowhere").status_code == 422
    assert client.get("/compare?q=zzz").text.count('type="checkbox"') == 0


def test_what_makes_a_number_doubtful_is_said(store: Store, tmp_path: Path) -> None:
    """Missing verdicts, another harness, other resources, a changed suite: all flagged; another harness below the rule."""
    seeded = seed_cycle(store, tmp_path, until=4)
    cycle_id = seeded.cycle.id or 0
    base, other, third, fourth = (
        c for n in ("Base", "RSR-1", "RPR-1", "RSR-2") if (c := store.checkpoints.named(cycle_id, n))
    )

    def save(checkpoint: int | None, record: EvaluationDone, **more: object) -> None:
        store.evaluations.save(record, cycle_id=cycle_id, checkpoint_id=checkpoint, **more)  # type: ignore[arg-type]

    plain = evaluation("Base", "own", 0.4, seed=1)
    save(base.id, plain, resources={"memory_mb": 256})
    first = plain.tasks[0]
    lost = replace(first, verdicts=(Verdict.INFRA_ERROR, *first.verdicts[1:]))
    holed = replace(
        evaluation("RSR-1", "own", 0.6, seed=2),
        tasks=(lost, *evaluation("RSR-1", "own", 0.6, seed=2).tasks[1:]),
        verdicts=119,
    )
    save(other.id, holed, resources={"memory_mb": 512})
    save(third.id, replace(evaluation("RPR-1", "own", 0.7, seed=3), settings={"harness": "terminus-2"}))
    save(fourth.id, replace(evaluation("RSR-2", "own", 0.7, seed=4), suite_digest="9" * 64))
    with client_as(store) as client:
        page = html.unescape(client.get(f"/compare?c={base.id},{other.id},{third.id},{fourth.id}&suite=own").text)
        config = client.get(f"/compare?c={base.id},{other.id}&suite=own&view=config").text
    assert "1 of 120 attempts have no verdict" in page
    assert "resources.memory_mb 256 and 512" in page
    assert "harness shell and terminus-2" in page
    assert "changed between the evaluations" in page
    below = page.partition("Measured under another harness")[2].partition("</tbody>")[0]
    assert "RPR-1</a>" in below
    assert "RSR-1</a>" not in below
    assert "evaluation.resources.memory_mb" in config
    assert "evaluation.temperature" not in config  # it agrees


def test_a_measurement_that_was_repeated_is_not_answered_from_memory(store: Store, tmp_path: Path) -> None:
    seeded = seed_cycle(store, tmp_path, until=2)
    pair = [store.checkpoints.named(seeded.cycle.id, n) for n in ("Base", "RSR-1")]
    address = f"/compare/scores.csv?c={','.join(str(c.id) for c in pair if c)}&suite=again"
    with client_as(store) as client:
        for rate in (0.2, 0.9):
            for number, c in enumerate(pair):
                assert c is not None
                record = evaluation(c.name, "again", rate, seed=number)
                store.evaluations.save(record, cycle_id=seeded.cycle.id, checkpoint_id=c.id)
            shown = [int(r["passed"]) for r in rows_of(client.get(address).text)]
            assert shown == [evaluation("x", "again", rate, seed=n).passed for n in range(2)]


def test_four_suites_name_what_is_missing(store: Store, tmp_path: Path) -> None:
    seeded = seed_cycle(store, tmp_path, until=2)
    for name, suites in (("Base", ("TB-2.1", "TB-3.0", "TB-4.0", "TB-Hard")), ("RSR-1", ("TB-2.1", "TB-4.0"))):
        checkpoint = store.checkpoints.named(seeded.cycle.id, name)
        assert checkpoint is not None
        for suite in suites:
            record = evaluation(name, suite, 0.5, seed=3)
            store.evaluations.save(record, cycle_id=seeded.cycle.id, checkpoint_id=checkpoint.id)
    with client_as(store) as client:
        page = client.get(f"/compare?c={seeded.cycle.id}/Base,{seeded.cycle.id}/RSR-1&suite=TB-2.1").text
    assert "missing TB-3.0, TB-Hard" in page
    rate = evaluation("Base", "TB-2.1", 0.5, seed=3)
    assert f'<td class="num">{100 * rate.passed / rate.verdicts:.1f} %</td>' in page


# ------------------------------------------------------------------------------------------------------ task and tokens


def test_a_task_page_leads_from_a_flip_to_its_trajectory(world: Analysed, client: SignedIn) -> None:
    checkpoint = world.checkpoints[3]
    page = client.get(f"/tasks/{SUITES[0]}/{SUITES[0]}-0001?checkpoint={checkpoint.id}").text
    assert f'<tr class="wanted" id="c{checkpoint.id}">' in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "system administration" in page
    assert "over the newest 16 stored attempts" in page
    own = page.partition(f'id="c{checkpoint.id}"')[2].partition("</tr>")[0]
    attempts = re.findall(r'href="(/trajectories/[^"]+)"', own)
    assert len(attempts) == 3
    assert client.get(attempts[0]).status_code == 200
    assert client.get(f"/tasks/{SUITES[0]}/none").status_code == 404


def test_tokens_show_what_was_kept_and_say_what_was_not(world: Analysed, client: SignedIn) -> None:
    made = world.trained
    page = client.get(f"/trajectories/{made.id}/tokens?turn=1").text
    segment = made.segments[0]
    at = int(segment.loss_mask.nonzero()[0][0])
    assert f"{segment.rollout_log_probs[at]:.4f}".replace("-", "−") in page
    value = -1 + 2 * at / 39
    assert f"{value:.4f}".replace("-", "−") in page  # the value, as frozen before the update
    assert "▲" in page
    assert "▼" in page
    assert "learner&#39;s log-probabilities are not kept" in page
    assert "0.625" in client.get(f"/trajectories?task={made.task_id}&phase=joint").text  # the reward column
    untrained = client.get(f"/trajectories/{world.seeded.hostile_id}/tokens?turn=0").text
    assert "No value and no advantage" in untrained
    assert client.get(f"/trajectories/{made.id}/tokens?turn=2").status_code == 404


def test_a_permalink_to_a_turn_opens_the_page_that_holds_it(world: Analysed, client: SignedIn) -> None:
    answer = client.get(f"/trajectories/{world.seeded.long_id}?turn=612")
    assert answer.status_code == 303
    assert answer.headers["location"] == f"/trajectories/{world.seeded.long_id}?first=500#t612"


def test_suspicious_passes_are_listed_with_their_evidence(world: Analysed, client: SignedIn) -> None:
    page = client.get("/suspicious").text
    passes = page.partition("Most expensive unsolved")[0]
    assert f'href="/trajectories/{world.suspicious.id}"' in passes
    assert "tests/test.sh was replaced &lt;script&gt;" in passes
    assert passes.count("/trajectories/") == 2  # the hostile one of the seeded cycle, too


# -------------------------------------------------------------------------------------------------------------- audits


def test_an_audit_is_run_from_the_form_and_logged(world: Analysed, client: SignedIn) -> None:
    form = {"csrf": client.csrf, "cycle": str(world.seeded.cycle.id), "first": "fdr", "second": "spr", "scales": "fit"}
    answer = client.post("/audits", data=form | {"recalibrate": "1"})
    assert answer.status_code == 303
    number = int(answer.headers["location"].rpartition("/")[2])
    stored = world.store.audits.get(number)
    assert stored.created_by == client.login
    page = client.get(f"/audits/{number}").text
    overall = next(r for r in stored.result["rows"] if r["formula"] == "fdr" and not r["family"])
    assert f"{100 * overall['failure_share']:.2f} %" in page
    assert page.count("family-1</th>") >= 1
    assert "Recalibration" in page
    figure = client.get(f"/audits/{number}/chart.json").json()
    go.Figure(figure)
    assert sum(sum(d["y"]) for d in figure["data"]) == pytest.approx(2)  # both rewards, all attempts
    assert len(rows_of(client.get(f"/audits/{number}/figures.csv").text)) == len(stored.result["rows"])
    assert f'href="/audits/{number}"' in client.get("/audits").text
    with world.store.transaction() as session:
        logged = session.execute(text("SELECT actor FROM audit_log WHERE action = 'audit.run'")).scalars().all()
    assert client.login in logged


def test_failures_that_are_paid_like_successes_are_listed(store: Store, tmp_path: Path) -> None:
    seeded = seed_cycle(store, tmp_path, until=1)
    scale = FamilyScale(family="family-1", value=0.5, attempts=0)
    with client_as(store) as client:
        client.follow_redirects = False
        attempts = [factories.trajectory(10 * n + 1, passed=False, turns=2, tokens=20) for n in range(3)]
        stage = seeded.stages[0]
        persist_many(store, stage, [AttemptFinished(phase=Phase.JOINT, trajectory=t) for t in attempts])
        form = {"csrf": client.csrf, "cycle": str(seeded.cycle.id), "first": "fdr", "scales": "given"}
        form |= {"given": f'{{"{scale.family}": {scale.value}}}'}
        number = client.post("/audits", data=form).headers["location"].rpartition("/")[2]
        page = client.get(f"/audits/{number}").text
        assert all(f'href="/trajectories/{t.id}"' in page for t in attempts)
        assert "drifted" in page  # this set's level is 1 check, twice the given scale
        assert len(rows_of(client.get(f"/audits/{number}/failures.csv").text)) == 3


def test_wrong_fields_are_told_beside_them_and_store_nothing(world: Analysed, client: SignedIn) -> None:
    before = len(world.store.audits.list(limit=1000).items)
    wrong = {
        "cycle": "9999",
        "checkpoint": "nobody",
        "phase": "lunch",
        "second": "fdr",
        "scales": "given",
        "given": "[",
    }
    answer = client.post("/audits", data={"csrf": client.csrf, "first": "bogus"} | wrong)
    assert answer.status_code == 422
    for field in ("cycle", "checkpoint", "phase", "first", "given"):
        assert f'id="wrong-{field}"' in answer.text, field
    assert 'value="9999"' in answer.text
    paths = client.post("/audits", data={"csrf": client.csrf, "scales": "given:/etc/hostname"})
    assert paths.status_code == 422
    frozen = client.post("/audits", data={"csrf": client.csrf, "scales": "frozen", "frozen": "/etc/hostname"})
    assert 'id="wrong-frozen"' in frozen.text
    assert client.post("/audits", data={"csrf": client.csrf, "phase": "joint"}).status_code == 422
    assert len(world.store.audits.list(limit=1000).items) == before


def test_only_leads_and_analysts_run_audits(world: Analysed) -> None:
    with client_as(world.store, Role.REVIEWER) as reviewer:
        assert "may look but not run" in reviewer.get("/audits/new").text
        assert reviewer.post("/audits", data={"csrf": reviewer.csrf, "scales": "fit"}).status_code == 403


def test_a_large_set_is_scored_in_a_process_of_its_own(
    world: Analysed, client: SignedIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webui.pages.audit_new.AT_ONCE", 10)
    form = {"csrf": client.csrf, "cycle": str(world.seeded.cycle.id), "scales": "fit", "name": "large"}
    answer = client.post("/audits", data=form)
    assert answer.status_code == 303
    job = answer.headers["location"]
    assert job.startswith("/audits/jobs/")
    deadline = time.monotonic() + 60
    while (page := client.get(job)).status_code == 200:
        assert page.headers["Refresh"] == "2"
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert page.status_code == 303
    made = world.store.audits.get(int(page.headers["location"].rpartition("/")[2]))
    assert (made.name, made.created_by) == ("large", client.login)
    assert client.get("/audits/jobs/999").status_code == 404
    assert audit_jobs.AT_ONCE >= 1000


# ------------------------------------------------------------------------------------------------------------ analysis


def test_a_cycles_analysis_shows_ev_by_position_and_family(world: Analysed, client: SignedIn) -> None:
    cycle_id = world.seeded.cycle.id
    page = client.get(f"/cycles/{cycle_id}/analysis").text
    assert re.search(r"<td>2</td><td>1</td>.*?0\.200</td>", page)
    assert "family-1" in page
    src = re.findall(r'data-src="([^"]+)"', page)
    assert len(src) == 1
    figure = client.get(src[0]).json()
    go.Figure(figure)
    assert figure["data"][0]["customdata"] == [0.0, 0.1, 0.2]
    assert figure["data"][0]["y"] == ["0", "1", "2"]
    assert "Nothing to analyse yet" not in page
    assert client.get("/cycles/999/analysis").status_code == 404


def test_a_cycles_analysis_shows_what_oversampling_shifted(store: Store, tmp_path: Path) -> None:
    seeded = seed_cycle(store, tmp_path, until=3)
    with store.transaction() as session:
        session.execute(text('UPDATE cycle SET config = \'{"rpr": [{"global_batch_size": 6}]}\''))
    with client_as(store) as client:
        page = client.get(f"/cycles/{seeded.cycle.id}/analysis").text
    assert "72 of 96 attempts of 12 joint steps were kept (batch 6)" in page
    assert re.search(r"<td>turns</td>", page)
