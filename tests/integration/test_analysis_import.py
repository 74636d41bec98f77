"""Harbor jobs become checkpoints, evaluations and trajectories; what is damaged is named and the rest lands."""

import os
from pathlib import Path

import pytest

from orchestrator.comparison_rows import score_rows, to_markdown
from orchestrator.comparisons import checkpoint_named, compare_checkpoints
from orchestrator.import_trials import ImportReport, import_harbor
from orchestrator.store import Store, TrajectoryFilter
from orchestrator.store.analysis_queries import AnalysisQueries
from stages.comparison import Convention, FlagKind
from stages.domain import CheckStatus
from stages.errors import ConfigError, TrialError
from tests import trials as t

REAL = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "tb2-trials"
BEFORE: dict[str, list[float | None]] = {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [0.0, None]}
AFTER: dict[str, list[float | None]] = {"a": [1.0, 1.0], "b": [1.0, 0.0], "c": [0.0, 0.0]}


def snapshot(store: Store) -> object:
    rows = AnalysisQueries(store).outcomes(TrajectoryFilter())
    evaluations = store.evaluations.list().items
    tasks = store.evaluations.tasks([e.id for e in evaluations if e.id])
    return (
        sorted(tuple(r) for r in rows),
        [e.model_dump(exclude={"created_at"}) for e in evaluations],
        {i: [x.model_dump() for x in own] for i, own in tasks.items()},
        [c.model_dump(exclude={"created_at"}) for c in store.checkpoints.list().items],
        [s.model_dump(exclude={"created_at"}) for s in store.suites.list()],
    )


def test_a_job_lands_whole_and_twice_is_once(store: Store, tmp_path: Path) -> None:
    job = t.job(tmp_path, "after", AFTER, transcript=t.atif())
    report = import_harbor(store, [job])
    (found,) = report.evaluations
    assert (found.checkpoint, found.suite, found.tasks) == ("after", "small-bench@1.0", 3)
    assert (found.passed, found.verdicts, found.attempts) == (3, 6, 6)
    assert (report.trials, report.with_checks, report.with_turns, report.skipped) == (6, 6, 6, ())
    checkpoint = checkpoint_named(store, "after")
    assert checkpoint.cycle_id is None
    assert checkpoint.metrics["model"] == "m-1"
    (evaluation,) = store.evaluations.list().items
    assert (evaluation.k, evaluation.tokens, evaluation.turns) == (2, 3 * (100 + 101), 12)
    assert evaluation.settings["agent.temperature"] == 0.6
    first = store.trajectories.list(TrajectoryFilter(task_id="b")).items[-1]
    detail = store.trajectories.detail(first.id)
    assert [turn.action for turn in detail.turns] == ["Look first.\nls", "Done\n[image]"]
    assert {c.status for c in detail.checks} == {CheckStatus.PASSED}
    once = snapshot(store)
    assert import_harbor(store, [job, job / "a__000"]).evaluations == report.evaluations
    assert snapshot(store) == once


def test_more_trials_of_a_checkpoint_add_up(store: Store, tmp_path: Path) -> None:
    whole = t.job(tmp_path, "one", AFTER)
    later = tmp_path / "two"
    t.trial(later, "a", 7, reward=0.0, checks=("failed",))
    import_harbor(store, [whole], checkpoint="x")
    (found,) = import_harbor(store, [later], checkpoint="x", suite="small-bench@1.0").evaluations
    assert (found.tasks, found.passed, found.attempts) == (3, 3, 7)
    once = snapshot(store)
    import_harbor(store, [whole], checkpoint="x")
    assert snapshot(store) == once
    assert len(store.evaluations.list().items) == 1


def test_the_damaged_are_named_and_the_rest_lands(store: Store, tmp_path: Path) -> None:
    job = t.job(tmp_path, "j", AFTER)
    (job / "a__000" / "result.json").write_text('{"id": "x', encoding="utf-8")
    (job / "b__000" / "verifier" / "ctrf.json").write_text("", encoding="utf-8")
    t.write(job / "b__001" / "agent" / "trajectory.json", "[1, 2")
    (job / "c__000" / "result.json").unlink()
    report = import_harbor(store, [job])
    (found,) = report.evaluations
    assert (found.passed, found.attempts) == (1, 3)
    assert [Path(line.split(" ")[0]).relative_to(job.parent).as_posix() for line in report.skipped] == [
        "j/c__000/result.json",
        "j/a__000/result.json",
        "j/b__000/verifier/ctrf.json",
    ]
    assert len(report.notes) == 1
    assert "b__001/agent/trajectory.json" in report.notes[0]


def test_a_copied_trial_is_counted_once(store: Store, tmp_path: Path) -> None:
    one, two = t.job(tmp_path, "j", {"a": [1.0]}), tmp_path / "copy" / "j"
    t.trial(two, "a", 0, reward=0.0)
    report = import_harbor(store, [one, two], checkpoint="x")
    assert report.evaluations[0].attempts == 1
    assert "the id, but not the result" in report.skipped[0]


def test_what_must_not_be_mixed_is_refused(store: Store, tmp_path: Path) -> None:
    job = t.job(tmp_path, "j", {"a": [1.0]})
    t.trial(job, "a", 5, model="m-2")
    t.trial(job, "a", 6, kwargs={"temperature": 1.0})
    names = [e.checkpoint for e in import_harbor(store, [job]).evaluations]
    assert sorted(names) == [
        "j m-1 agent.temperature=0.6",
        "j m-1 agent.temperature=1.0",
        "j m-2 agent.temperature=0.6",
    ]
    with pytest.raises(ConfigError, match="would mix"):
        import_harbor(store, [job], checkpoint="x")
    import_harbor(store, [job / "a__000"], checkpoint="x")
    before = snapshot(store)
    for other in ("a__005", "a__006"):
        with pytest.raises(ConfigError, match="another --checkpoint"):
            import_harbor(store, [job / other], checkpoint="x")
    t.trial(tmp_path / "k", "a", 0, checksum="changed")
    with pytest.raises(ConfigError, match="another version of task a"):
        import_harbor(store, [tmp_path / "k"], checkpoint="x", suite="small-bench@1.0")
    assert snapshot(store) == before


def test_nothing_to_import_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TrialError, match="no trial"):
        import_harbor(store, [tmp_path])
    with pytest.raises(TrialError, match="no folder"):
        import_harbor(store, [tmp_path / "gone"])


def test_jobs_named_by_their_time_take_the_model_name(store: Store, tmp_path: Path) -> None:
    job = t.job(tmp_path, "2026-01-31__12-00-00", {"a": [1.0]})
    assert import_harbor(store, [job]).evaluations[0].checkpoint == "m-1"


def test_strange_names_neither_stop_nor_reach_the_terminal(store: Store, tmp_path: Path) -> None:
    job = tmp_path / os.fsdecode(b"j\xff\x1b[2J")
    t.trial(job, "a", 0, id="one")
    t.trial(job, "b", 0, id="two", reward=2.0)
    report = import_harbor(store, [job])
    assert report.evaluations[0].checkpoint == "j\ufffd\ufffd[2J"
    assert "\x1b" not in report.skipped[0]
    report.skipped[0].encode("utf-8")


def test_several_datasets_under_one_name_are_one_evaluation(store: Store, tmp_path: Path) -> None:
    one, two = t.job(tmp_path, "one", {"a": [1.0]}), tmp_path / "two"
    t.trial(two, "b", 0)  # a job without config.json: no version
    report = import_harbor(store, [one, two], checkpoint="x", suite="mine")
    assert [(e.suite, e.tasks, e.passed) for e in report.evaluations] == [("mine", 2, 2)]


def test_imported_checkpoints_compare(store: Store, tmp_path: Path) -> None:
    import_harbor(store, [t.job(tmp_path, "before", BEFORE), t.job(tmp_path, "after", AFTER)])
    report = compare_checkpoints(store, ["before", "after"], resamples=200)
    (suite,) = report.suites
    (found,) = suite.comparisons
    assert found.difference == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    assert (found.improved, found.worsened) == (("a", "b"), ())
    kinds = {f.kind for f in found.flags}
    assert {FlagKind.MISSING_VERDICTS, FlagKind.UNEQUAL_DENOMINATORS} <= kinds
    assert FlagKind.DIFFERENT_SETTINGS not in kinds
    text = to_markdown(report)
    assert "1/5 = 20.0 %" in text
    assert [row["zone"] for row in score_rows(suite)] == ["same harness", "same harness"]
    assert "1/6 = 16.7 %" in text


def test_a_changed_suite_compares_on_unchanged_tasks_only(store: Store, tmp_path: Path) -> None:
    import_harbor(store, [t.job(tmp_path, "before", BEFORE)])
    job = t.job(tmp_path, "after", {"a": [1.0], "b": [1.0]}, kwargs={"temperature": 1.0})
    t.trial(job, "c", 0, checksum="changed", kwargs={"temperature": 1.0})
    import_harbor(store, [job])
    (found,) = compare_checkpoints(store, ["before", "after"], resamples=200).suites[0].comparisons
    assert found.common_tasks == 2
    assert {FlagKind.SUITE_CHANGED, FlagKind.DIFFERENT_SETTINGS, FlagKind.UNPAIRED_TASKS} <= {
        f.kind for f in found.flags
    }


def test_bad_comparisons_are_refused(store: Store, tmp_path: Path) -> None:
    import_harbor(store, [t.job(tmp_path, "before", BEFORE), t.job(tmp_path, "after", AFTER)])
    for names, suite, word in (
        (["before"], None, "at least two"),
        (["before", "before"], None, "at least two"),
        (["before", "after"], "other", "none of these"),
    ):
        with pytest.raises(ConfigError, match=word):
            compare_checkpoints(store, names, suite=suite)


@pytest.fixture
def real(store: Store) -> ImportReport:
    if not REAL.is_dir():
        pytest.skip("the shared trials are not here")
    return import_harbor(store, [REAL])


def test_the_published_figures_come_out(store: Store, real: ImportReport) -> None:
    found = {e.checkpoint: (e.passed, e.attempts, e.verdicts, e.tasks, e.suite) for e in real.evaluations}
    assert found == {
        "tmax-9b": (121, 445, 438, 89, "terminal-bench@2.0"),
        "Qwen3.5-9B": (94, 445, 444, 89, "terminal-bench@2.0"),
    }
    assert (real.trials, real.with_checks, real.with_turns, real.skipped, real.notes) == (890, 816, 12, (), ())
    report = compare_checkpoints(store, ["Qwen3.5-9B", "tmax-9b"], resamples=999)
    (suite,) = report.suites
    text = to_markdown(report)
    for figure in ("121/445 = 27.2 %", "94/445 = 21.1 %", "121/438 = 27.6 %", "94/444 = 21.2 %"):
        assert figure in text
    (c,) = suite.comparisons
    assert c.convention is Convention.VERDICTS
    assert c.interval is not None
    assert c.difference is not None
    assert c.interval.low < c.difference < c.interval.high
    assert c.tasks_needed is not None
    board = compare_checkpoints(store, ["Qwen3.5-9B", "tmax-9b"], convention=Convention.ATTEMPTS, resamples=999)
    difference = board.suites[0].comparisons[0].difference
    assert difference == pytest.approx((121 - 94) / 445)
