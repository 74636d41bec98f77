"""Audits of stored trajectories, EV curves of stored steps, reference rows, and the commands on top of them."""

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import analysis, audits, exports
from orchestrator import models as m
from orchestrator.audits import AuditSpec, load_outcomes, parse_formulas, run_audit
from orchestrator.cli import app
from orchestrator.import_trials import import_harbor
from orchestrator.store import Store, TrajectoryFilter
from stages.domain import FamilyScale, Phase
from stages.errors import ConfigError, RewardError, StoreError
from stages.outcomes import Outcomes
from stages.rescore import rescore
from stages.rewards import Progress, RewardKind, RewardModel, fit_scales
from tests import factories
from tests import trials as t

REAL = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "tb2-trials"
EVERY = tuple(RewardKind)


@pytest.fixture
def cycle(store: Store) -> m.Stage:
    """Forty joint attempts of stage RPR-1, gates among their checks."""
    row = factories.cycle(store)
    stage = factories.stages(store, row.id or 0)[2]
    rows = [factories.trajectory(n) for n in range(40)]
    store.trajectories.add(rows, cycle_id=row.id, stage_id=stage.id, phase=Phase.JOINT)
    return stage


def test_stored_columns_are_the_trajectories_own(store: Store, cycle: m.Stage) -> None:
    """What the database gives equals `Outcomes.from_trajectories`: every formula scores the same, gates included."""
    own = Outcomes.from_trajectories([factories.trajectory(n) for n in range(40)])
    stored = load_outcomes(store, TrajectoryFilter(stage_id=cycle.id))
    assert stored.ids == own.ids
    scales = fit_scales(own)
    assert fit_scales(stored) == scales
    for kind in RewardKind:
        model = RewardModel(kind=kind, scales=scales if kind.needs_scales else ())
        assert model.score_outcomes(stored).tolist() == model.score_outcomes(own).tolist()


def test_an_audit_is_stored_whole(store: Store, cycle: m.Stage) -> None:
    where = TrajectoryFilter(cycle_id=cycle.cycle_id, stage_id=cycle.id, phase=Phase.JOINT)
    made = run_audit(store, AuditSpec(where=where, formulas=EVERY))
    audit = store.audits.get(made.id or 0)
    direct = rescore(
        load_outcomes(store, where),
        {
            k.value: RewardModel(kind=k, scales=fit_scales(load_outcomes(store, where)) if k.needs_scales else ())
            for k in EVERY
        },
    )
    assert audit.result["rows"] == list(direct.rows())
    assert audit.result["verdicts"] == 40
    assert audit.selection["phase"] == "joint"
    assert {f["label"] for f in audit.formulas} == {"count", "binary", "fdr", "spr"}
    listed = audits.failures(store, audit)
    expected = sum(len(f.failures_at_or_above_one) + len(f.gate_only_failures) for f in direct.formulas)
    assert len(listed) == expected
    again = run_audit(store, AuditSpec(where=where))
    assert audits.same_set([audit, again])
    other = run_audit(store, AuditSpec(where=TrajectoryFilter(task_id="task-1")))
    assert not audits.same_set([audit, other])


def test_given_scales_of_a_stage_and_of_a_file(store: Store, cycle: m.Stage, tmp_path: Path) -> None:
    assert cycle.id is not None
    families = [f"family-{n}" for n in range(10)]
    scales = [FamilyScale(family=f, value=4.0, attempts=20) for f in families]
    store.profiles.save(cycle.id, Phase.PROFILE, scales)
    file = tmp_path / "scales.json"
    file.write_text(json.dumps(dict.fromkeys(families, 4.0)), encoding="utf-8")
    where = TrajectoryFilter(stage_id=cycle.id)
    by_stage = run_audit(store, AuditSpec(where=where, scales=f"given:{cycle.cycle_id}/RPR-1"))
    by_file = run_audit(store, AuditSpec(where=where, scales=f"given:{file}"))
    assert by_stage.result == by_file.result
    # 14 of 40 passed with P = 2 of D = 4; 26 failed with P = 1: SPR is exactly 1 + 2/6 and 1/5
    spr = next(r for r in by_stage.result["rows"] if r["formula"] == "spr" and not r["family"])
    assert spr["mean_success"] == pytest.approx(1 + 2 / 6)
    assert spr["mean_failure"] == pytest.approx(1 / 5)
    for bad, word in (
        ('{"family-0": 0}', "no number above 0"),
        ("[]", "no object"),
        ("{", "no JSON"),
        ('{"family-0": true}', "no number above 0"),
    ):
        file.write_text(bad, encoding="utf-8")
        with pytest.raises(ConfigError, match=word):
            run_audit(store, AuditSpec(where=where, scales=f"given:{file}"))
    for given in ("given:", "best", f"given:{cycle.cycle_id}/RSR-1", f"given:{cycle.cycle_id}/XX", "given:gone.json"):
        with pytest.raises(ConfigError):
            run_audit(store, AuditSpec(where=where, scales=given))
    file.write_text('{"family-0": 1}', encoding="utf-8")
    with pytest.raises(RewardError, match="family-1 has no scale"):
        run_audit(store, AuditSpec(where=where, scales=f"given:{file}"))


def test_an_empty_set_or_formula_is_refused(store: Store) -> None:
    with pytest.raises(RewardError, match="no attempt with a verdict"):
        run_audit(store, AuditSpec(where=TrajectoryFilter(suite="nothing"), formulas=(RewardKind.BINARY,)))
    with pytest.raises(RewardError):
        run_audit(store, AuditSpec(where=TrajectoryFilter(suite="nothing")))
    with pytest.raises(ConfigError, match="unknown formula"):
        parse_formulas("fdr,best")
    assert parse_formulas("spr, FDR,spr") == (RewardKind.SPR, RewardKind.FDR)
    assert store.audits.list().items == []


def test_imported_trials_are_audited(store: Store, tmp_path: Path) -> None:
    job = t.job(tmp_path, "j", {"a": [1.0, 0.0, None]})
    t.trial(job, "a", 8, reward=0.0, checks=("passed", "passed"))  # every check passed, the verifier said no
    t.trial(job, "b", 0, reward=1.0, checks=None)  # no report: f/binary
    import_harbor(store, [job])
    made = run_audit(store, AuditSpec(where=TrajectoryFilter(suite="small-bench@1.0"), formulas=EVERY))
    assert (made.result["verdicts"], made.result["masked"]) == (4, 1)
    rows = {(r["formula"], r["family"]): r for r in made.result["rows"]}
    assert set(rows) == {(k.value, f) for k in EVERY for f in ("", "small-bench@1.0", "small-bench@1.0/binary")}
    assert rows["fdr", ""]["gate_only_failures"] == 1
    assert rows["fdr", ""]["failures_at_or_above_one"] == 1  # D = 2, P = 2
    assert rows["spr", ""]["failures_at_or_above_one"] == 0
    assert rows["spr", "small-bench@1.0/binary"]["mean_success"] == 1.5
    assert rows["count", ""]["mean_success"] == pytest.approx((2 / 20 + 1) / 2)


def test_the_audit_runs_on_the_shared_trials(store: Store) -> None:
    if not REAL.is_dir():
        pytest.skip("the shared trials are not here")
    import_harbor(store, [REAL])
    made = run_audit(store, AuditSpec(where=TrajectoryFilter(suite="terminal-bench@2.0"), formulas=EVERY))
    assert (made.result["verdicts"], made.result["masked"]) == (882, 8)
    overall = {r["formula"]: r for r in made.result["rows"] if not r["family"]}
    assert {r["successes"] for r in overall.values()} == {121 + 94}
    assert overall["binary"]["failure_share"] == 0.0
    assert overall["spr"]["failures_at_or_above_one"] == 0
    assert overall["spr"]["failure_share"] < overall["fdr"]["failure_share"]


def test_net_of_nop_is_kept_in_the_selection(store: Store, cycle: m.Stage) -> None:
    spec = AuditSpec(where=TrajectoryFilter(stage_id=cycle.id), progress=Progress.NET_OF_NOP, recalibrated=True)
    assert run_audit(store, spec).selection == {
        "stage_id": cycle.id,
        "scales": "fit",
        "recalibrated": True,
        "progress": "net_of_nop",
    }


# ------------------------------------------------------------------------------------------------ EV


def test_ev_curves_by_phase_family_and_turn(store: Store, cycle: m.Stage) -> None:
    assert cycle.id is not None
    ev = "critic/vf_explained_var"
    store.stages.start_phase(cycle.id, Phase.CALIBRATE, 4, 1)
    for step, value in enumerate((-0.5, 0.1, None, 0.2), 1):
        store.metrics.add(cycle.id, Phase.CALIBRATE, step, {ev: value, f"{ev}/turn/00": value, "rollout/x": 1.0})
    store.stages.start_phase(cycle.id, Phase.JOINT, 3, 1)
    for step, value in enumerate((-0.1, None, -0.3, -0.2), 1):
        store.metrics.add(cycle.id, Phase.JOINT, step, {ev: value, f"{ev}/family/a/b": value, f"{ev}/turn/07": 0.5})
    (curve,) = analysis.ev_curves(store, cycle_id=cycle.cycle_id, patience=3)
    assert (curve.stage, curve.stage_id) == ("RPR-1", cycle.id)
    assert [(p.phase, p.step, p.value) for p in curve.points] == [
        *[(Phase.CALIBRATE, n, v) for n, v in enumerate((-0.5, 0.1, None, 0.2), 1)],
        *[(Phase.JOINT, n, v) for n, v in enumerate((-0.1, None, -0.3, -0.2), 1)],
    ]
    assert set(curve.by_family) == {"a/b"}
    assert list(curve.by_turn) == [0, 7]
    assert curve.alarm is not None
    assert (curve.alarm.steps, curve.alarm.lowest) == (3, -0.3)
    assert "below 0 in 3 joint steps" in analysis.alarm_text(curve.alarm)
    assert set(curve.stale_families) == {"a/b"}
    assert curve.last is not None
    assert curve.last.value == -0.2
    (patient,) = analysis.ev_curves(store, stage_ids=[cycle.id], patience=4)
    assert patient.alarm is None
    assert analysis.ev_curves(store, cycle_id=999) == ()


def test_oversampling_of_stored_steps(store: Store, cycle: m.Stage) -> None:
    assert cycle.id is not None
    rows = [factories.trajectory(100 + n, turns=1 + n % 5) for n in range(20)]
    store.trajectories.add(
        rows, cycle_id=cycle.cycle_id, stage_id=cycle.id, phase=Phase.JOINT, steps=[1] * 10 + [2] * 10
    )
    report = analysis.oversampling(store, cycle.id, batch=8)
    assert (report.steps, report.started, report.masked, report.kept) == (3, 60, 0, 24)
    late = {t.id for n, t in enumerate(rows) if n % 5 == 4}  # the longest two of each ten
    assert late <= set(report.dropped)
    assert report.shifts[0].name == "turns"
    assert report.shifts[0].shift < 0


# ------------------------------------------------------------------------------------------------ commands


def test_commands_print_and_export(
    store: Store, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("RSI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RSI_ARTIFACT_URL", str(tmp_path / "artifacts"))

    def rsi(*words: str) -> str:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    before = t.job(tmp_path, "before", {"=a": [1.0, 0.0], "b": [0.0, 0.0]})
    after = t.job(tmp_path, "after", {"=a": [1.0, 1.0], "b": [0.0, 1.0]})
    said = rsi("import", "harbor", str(before), str(after), "--suite", "TB-2.1")
    assert "3/4 = 75.0 %" in said
    assert "8 trials stored" in said
    count = int(rsi("import", "reference").split()[0])
    assert rsi("import", "reference").startswith(f"{count} ")
    assert len(store.references.list()) == count
    said = rsi("compare", "before", "after")
    assert "before → after" in said
    assert "Reference only" in said
    found = json.loads(rsi("compare", "before", "after", "--format", "json"))
    assert found["comparisons"][0]["difference"] == 0.5
    assert [s["attempts"] for s in found["scores"]] == [4, 4]
    rsi("compare", "before", "after", "--format", "csv", "-o", str(tmp_path / "c.csv"))
    (row,) = csv.DictReader((tmp_path / "c.csv").open(encoding="utf-8"))
    assert row["difference"] == "0.5"

    assert "fdr" in rsi("audit", "run", "--suite", "TB-2.1", "--name", "first")
    assert "first" in rsi("audit", "list")
    assert "the same set" in rsi("audit", "show", "1", "--against", "1")
    rows = list(csv.DictReader(io.StringIO(rsi("audit", "export", "1"))))
    assert rows[0]["attempts"] == "8"
    document = json.loads(rsi("audit", "export", "1", "--format", "json"))
    assert document["verdicts"] == 8
    assert "lists" not in document
    assert document["failures"] == []
    assert rsi("audit", "export", "1", "--failures", "--format", "markdown") == "(no rows)\n"
    for words, error in (
        (["audit", "show", "9"], StoreError),
        (["audit", "run", "--stage", "RPR-1"], ConfigError),
        (["audit", "run", "--cycle", "77"], StoreError),
        (["audit", "run", "--checkpoint", "nobody"], StoreError),
        (["compare", "before", "nobody"], StoreError),
        (["compare", "before", "after", "-o", str(tmp_path / "gone" / "x")], ConfigError),
    ):
        assert isinstance(CliRunner().invoke(app, words).exception, error)


def test_a_cell_that_a_spreadsheet_would_run_is_quoted() -> None:
    assert exports.to_csv([{"a": "=1+1", "b": -1.5, "c": None}]) == "a,b,c\n'=1+1,-1.5,\n"
    assert exports.to_markdown([{"a": "x|y", "b": None}]) == "| a | b |\n| --- | --- |\n| x\\|y | — |\n"
