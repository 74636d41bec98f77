"""Every record becomes rows and one event; a repeated record changes nothing else."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from rich.console import Console

from orchestrator import models as m
from orchestrator.commands.cycle_view import score_table
from orchestrator.persist import Recorder, persist, persist_many
from orchestrator.store import Store, TrajectoryFilter
from stages.domain import (
    Boundary,
    CheckRole,
    CheckStatus,
    Decision,
    EndReason,
    FamilyScale,
    Finding,
    LeakPart,
    Phase,
    Review,
    Runbook,
    RunbookLine,
    Severity,
    Turn,
    Verdict,
)
from stages.errors import StoreError
from stages.records import (
    AttemptFinished,
    Candidate,
    CheckpointSaved,
    EvaluationDone,
    PhaseDone,
    PhaseStarted,
    Progress,
    Record,
    ReplayJudged,
    RunbookReviewed,
    RunbookWritten,
    ScalesProfiled,
    Selected,
    StepDone,
    SurplusDropped,
    TaskScore,
)
from tests import factories

BOOK = Runbook(
    id="b1",
    task_id="task-1",
    source_trajectory_id=factories.trajectory(1).id,
    planner="Base",
    lines=(RunbookLine(text="list the folder", cites=(0, 2)), RunbookLine(text="write it")),
    raw_text="1. list\x00 the folder\n2. write it",
)
FINDING = Finding(
    part=LeakPart.ARTIFACT, severity=Severity.SOFT, rule="artifact.hash", message="a hash", line=1, start=2, end=7
)
EVALUATION = EvaluationDone(
    suite="heldout",
    suite_digest="d1",
    checkpoint="RSR-1",
    k=3,
    passed=2,
    attempts=3,
    verdicts=2,
    tasks=(
        TaskScore(
            task_id="task-1",
            family="f",
            stratum="easy",
            verdicts=(Verdict.PASSED, Verdict.PASSED, Verdict.INFRA_ERROR),
            checks_passed=(2, 2, 0),
            checks_total=2,
        ),
    ),
    settings={"sampling.temperature": 0.6},
)
RECORDS: list[Record] = [
    PhaseStarted(phase=Phase.EXPLORE, total=4),
    *(AttemptFinished(phase=Phase.EXPLORE, trajectory=factories.trajectory(n)) for n in range(4)),
    Progress(phase=Phase.EXPLORE, done=4, total=4, text="2/4 passed"),
    PhaseDone(phase=Phase.EXPLORE, facts={"attempts": 4, "ratio": float("nan"), "none": None}),
    RunbookWritten(runbook=BOOK),
    RunbookReviewed(review=Review(runbook_id="b1", revision=1, reviewer="rules", decision=Decision.APPROVE)),
    RunbookReviewed(
        review=Review(
            runbook_id="b1", revision=1, reviewer="model:Base", decision=Decision.APPROVE, findings=(FINDING,)
        )
    ),
    PhaseStarted(phase=Phase.REPLAY),
    AttemptFinished(phase=Phase.REPLAY, trajectory=replace(factories.trajectory(9), runbook_id="b1")),
    ReplayJudged(trajectory_id=factories.trajectory(9).id, runbook_id="b1", accepted=True),
    AttemptFinished(phase=Phase.JOINT, trajectory=factories.trajectory(8)),
    SurplusDropped(phase=Phase.JOINT, step=1, trajectory_ids=(factories.trajectory(8).id,), completed=True),
    StepDone(phase=Phase.DISTIL, step=1, metrics={"train/loss": 1.5, "critic/vf_explained_var": None}),
    ScalesProfiled(phase=Phase.PROFILE, scales=(FamilyScale(family="f", value=2.5, attempts=20, multiplier=2.0),)),
    CheckpointSaved(name="RSR-1", path=Path("/nowhere/rsr-1"), actor_digest="a1", critic_digest=None, retained=True),
    Selected(
        phase=Phase.VALIDATE,
        chosen="RSR-1",
        candidates=(
            Candidate(label="parent", passed=1, attempts=3, verdicts=3),
            Candidate(label="RSR-1", passed=2, attempts=3, verdicts=3),
        ),
        suite="validation",
        suite_digest="v1",
    ),
    EVALUATION,
]


def _count(store: Store, table: str) -> int:
    with store.transaction() as session:
        return session.execute(sa.text(f'SELECT count(*) FROM "{table}"')).scalar_one()


@pytest.fixture
def stage(store: Store) -> m.Stage:
    cycle_id = factories.cycle(store).id
    assert cycle_id is not None
    rows = factories.stages(store, cycle_id)
    base = store.checkpoints.save(m.Checkpoint(cycle_id=cycle_id, stage_id=rows[0].id, name="Base", actor_digest="a0"))
    return store.stages.start(rows[1].id or 0, actor_parent_id=base.id)


def _record_all(store: Store, stage: m.Stage) -> None:
    with Recorder(store, stage) as recorder:
        for record in RECORDS:
            recorder.record(record)


def test_all_records_twice(store: Store, stage: m.Stage) -> None:
    stage_id = stage.id or 0
    _record_all(store, stage)
    tables = [
        "trajectory", "turn", "check_result", "segment", "runbook", "review", "finding", "replay", "step_metric",
        "profile", "family_scale", "checkpoint", "selection", "evaluation", "evaluation_task", "harness_setting",
        "stage_phase", "artifact",
    ]  # fmt: skip
    first = {table: _count(store, table) for table in tables}
    assert all(first.values()), first
    assert (first["trajectory"], first["turn"], first["checkpoint"], first["artifact"]) == (6, 48, 2, 8)
    _record_all(store, stage)
    assert {table: _count(store, table) for table in tables} == first

    kinds = [event.kind for event in store.events.after(0)]
    others = {m.EventKind.ALARM, m.EventKind.LOG, m.EventKind.CYCLE_STATE, m.EventKind.REVIEWS_CHANGED}  # of no record
    assert set(kinds) >= {k.value for k in m.EventKind} - others
    with store.transaction() as session:
        found = set(session.execute(sa.text("SELECT DISTINCT phase FROM trajectory")).scalars())
    assert found == {Phase.EXPLORE, Phase.REPLAY, Phase.JOINT_SURPLUS}
    phases = store.stages.phases(stage_id)
    assert phases[Phase.EXPLORE].state is m.PhaseState.DONE
    assert phases[Phase.EXPLORE].facts == {"attempts": 4, "ratio": "nan", "none": None}
    row = store.stages.get(stage_id)
    assert (row.phase, row.attempt, row.state) == (Phase.REPLAY, 1, m.StageState.RUNNING)


def test_what_a_resumed_flow_reads(store: Store, stage: m.Stage) -> None:
    stage_id = stage.id or 0
    _record_all(store, stage)
    explored = store.trajectories.load(stage_id, Phase.EXPLORE)
    assert len(explored) == 4
    assert all(factories.same(a, factories.trajectory(n)) for n, a in enumerate(explored))
    assert store.trajectories.ids(stage_id, Phase.EXPLORE) == {t.id for t in explored}
    (book,) = store.runbooks.load(stage_id)
    assert book == replace(BOOK, raw_text=BOOK.raw_text.replace("\x00", "␀"))
    assert [r.reviewer for r in store.reviews.load(stage_id)] == ["rules", "model:Base"]
    assert store.reviews.load(stage_id)[1].findings == (FINDING,)
    assert store.replays.accepted_ids(stage_id) == {factories.trajectory(9).id}
    assert store.profiles.load(stage_id) == (FamilyScale(family="f", value=2.5, attempts=20, multiplier=2.0),)
    assert store.metrics.steps(stage_id, Phase.DISTIL) == {1: {"train/loss": 1.5, "critic/vf_explained_var": None}}
    selection = store.selections.get(stage_id, Phase.VALIDATE)
    assert selection is not None
    assert (selection.chosen, len(selection.candidates)) == ("RSR-1", 2)


def test_the_checkpoint_that_acted(store: Store, stage: m.Stage) -> None:
    _record_all(store, stage)
    replayed = store.trajectories.get(factories.trajectory(9).id)
    saved = store.checkpoints.named(stage.cycle_id, "RSR-1")
    assert saved is not None
    assert (saved.actor_parent_id, saved.critic_parent_id, saved.retained) == (stage.actor_parent_id, None, True)
    assert replayed.checkpoint_id == stage.actor_parent_id  # RSR-1 was not saved when it was recorded
    after = replace(factories.trajectory(10), suite="heldout")
    persist(store, stage, AttemptFinished(phase=Phase.EVALUATE, trajectory=after))
    assert store.trajectories.get(after.id).checkpoint_id == saved.id
    (evaluation,) = store.evaluations.list(stage_id=stage.id).items
    assert evaluation.checkpoint_id == saved.id
    assert (evaluation.passed, evaluation.attempts, evaluation.verdicts) == (2, 3, 2)
    (task,) = store.evaluations.tasks([evaluation.id or 0])[evaluation.id or 0]
    assert (task.passed, task.attempts, task.verdict_count) == (2, 3, 2)
    assert task.verdicts == ["passed", "passed", "infra_error"]


def test_a_kept_parent_is_shown(store: Store, stage: m.Stage) -> None:
    kept = CheckpointSaved(
        name="RSR-1", path=Path("/nowhere"), actor_digest="a0", critic_digest=None, retained=True, parent_kept=True
    )
    persist(store, stage, kept)
    saved = store.checkpoints.named(stage.cycle_id, "RSR-1")
    assert saved is not None
    assert saved.parent_kept
    table = Console(width=200)
    with table.capture() as shown:
        table.print(score_table(store, stage.cycle_id))
    assert "RSR-1 (parent kept)" in shown.get()
    persist(store, stage, replace(kept, parent_kept=False))
    assert not store.checkpoints.named(stage.cycle_id, "RSR-1").parent_kept  # type: ignore[union-attr]


def test_runbook_states(store: Store, stage: m.Stage) -> None:
    def review(reviewer: str, decision: Decision, revision: int = 1) -> RunbookReviewed:
        return RunbookReviewed(review=Review(runbook_id="b1", revision=revision, reviewer=reviewer, decision=decision))

    def state(revision: int | None = None) -> m.RunbookState:
        return store.runbooks.get("b1", revision).state

    persist(store, stage, RunbookWritten(runbook=BOOK))
    assert state() is m.RunbookState.WRITTEN
    persist(store, stage, review("rules", Decision.APPROVE), human_review=True)
    assert state() is m.RunbookState.WAITING
    persist(store, stage, review("person:anna", Decision.APPROVE), human_review=True)
    assert state() is m.RunbookState.WAITING  # the gate decides about people's verdicts
    persist(store, stage, review("model:x", Decision.REJECT), human_review=True)
    assert state() is m.RunbookState.WAITING  # nor does a model's rejection decide over people
    persist(store, stage, RunbookWritten(runbook=replace(BOOK, revision=2)))
    assert (state(1), state()) == (m.RunbookState.SUPERSEDED, m.RunbookState.WRITTEN)
    persist(store, stage, review("model:x", Decision.REJECT, 2))
    persist(store, stage, review("model:y", Decision.APPROVE, 2))
    assert state() is m.RunbookState.REJECTED  # without people it is final: not lifted by a later approval
    persist(store, stage, RunbookWritten(runbook=replace(BOOK, revision=3)))
    persist(store, stage, review("rules", Decision.APPROVE, 3))
    persist(store, stage, PhaseStarted(phase=Phase.REPLAY))
    assert state() is m.RunbookState.CONSUMED
    persist(store, stage, review("model:x", Decision.REJECT, 3))
    assert state() is m.RunbookState.CONSUMED


def test_a_withdrawn_verdict_stays_on_record(store: Store, stage: m.Stage) -> None:
    persist(store, stage, RunbookWritten(runbook=BOOK))
    mine = Review(runbook_id="b1", revision=1, reviewer="person:anna", decision=Decision.APPROVE)
    assert store.reviews.add(mine, key="form-1")
    assert not store.reviews.add(mine, key="form-1")  # the form was sent twice
    assert set(store.reviews.standing("b1", 1)) == {"person:anna"}
    assert store.reviews.withdraw("b1", 1, "person:anna", key="form-2")
    assert store.reviews.standing("b1", 1) == {}
    assert store.reviews.load(stage.id or 0) == []
    assert [r.decision for r in store.reviews.of("b1", 1)] == [m.ReviewDecision.APPROVE, m.ReviewDecision.WITHDRAW]


def test_text_that_postgres_refuses_is_shown_and_kept(store: Store, stage: m.Stage) -> None:
    turn = Turn(index=0, action="printf '\\0'", observation="a\x00b \udc80 é", exit_code=0)
    given = replace(factories.trajectory(1), turns=(turn,), flags=("odd\x00flag",))
    persist(store, stage, AttemptFinished(phase=Phase.EXPLORE, trajectory=given))
    detail = store.trajectories.detail(given.id)
    assert detail.turns[0].observation == "a␀b � é"
    assert detail.trajectory.flags == ["odd␀flag"]
    assert factories.same(store.trajectories.whole(given.id), given)


def test_a_repeated_attempt_replaces_itself(store: Store, stage: m.Stage) -> None:
    first = factories.trajectory(1, turns=8)
    again = replace(first, turns=first.turns[:2], duration_s=9.0)
    persist(store, stage, AttemptFinished(phase=Phase.EXPLORE, trajectory=first))
    persist(store, stage, AttemptFinished(phase=Phase.EXPLORE, trajectory=again))
    detail = store.trajectories.detail(first.id)
    assert (len(detail.turns), detail.trajectory.n_turns, detail.trajectory.duration_s) == (2, 2, 9.0)
    assert factories.same(store.trajectories.load(stage.id or 0, Phase.EXPLORE)[0], again)


def test_all_or_nothing(store: Store, stage: m.Stage) -> None:
    def half() -> None:
        with store.transaction():
            persist(store, stage, RECORDS[0])
            persist_many(store, stage, [AttemptFinished(phase=Phase.EXPLORE, trajectory=factories.trajectory(1))])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert store.stages.phases(stage.id or 0) == {}
    assert store.trajectories.count(TrajectoryFilter()) == 0
    assert m.EventKind.ATTEMPTS not in [e.kind for e in store.events.after(0)]
    with pytest.raises(StoreError, match="refuses a row"):
        persist(store, stage, ReplayJudged(trajectory_id="unknown", runbook_id="b1", accepted=True))


def test_masked_attempts_are_counted(store: Store, stage: m.Stage) -> None:
    cut = replace(factories.trajectory(1), verdict=Verdict.NONE, end_reason=EndReason.CANCELLED, checks=())
    persist(store, stage, AttemptFinished(phase=Phase.JOINT, trajectory=cut, step=3))
    persist(store, stage, AttemptFinished(phase=Phase.JOINT, trajectory=factories.trajectory(3), step=3))
    counts = {(c[2], c[3]): c[4] for c in store.trajectories.verdict_counts(stage.id or 0)}
    assert counts == {(Verdict.NONE, EndReason.CANCELLED): 1, (Verdict.PASSED, EndReason.DONE): 1}
    row = store.trajectories.get(cut.id)
    assert (row.strict, row.n_checks, row.only_gate_failed) == (False, 0, False)
    totals = store.trajectories.boundaries(stage.id or 0)
    assert totals == {Boundary.STRICT_PREFIX: 14, Boundary.TRIMMED: 2, "drift_tokens": 0}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"turns": (Turn(index=0, action="sleep 9", observation="", exit_code=None, timed_out=True),)}, "timed out"),
        ({"verdict": Verdict.INFRA_ERROR, "end_reason": EndReason.ERROR}, "sandbox or sampler"),
        ({"end_reason": EndReason.TIME_LIMIT}, "ran out of time"),
    ],
)
def test_a_clock_that_decided_voids_the_digest_claim(store: Store, stage: m.Stage, change, said: str) -> None:
    whole = AttemptFinished(phase=Phase.EXPLORE, trajectory=factories.trajectory(1))
    persist(store, stage, whole)
    assert store.cycles.get(stage.cycle_id).digest_claim_void == ""
    cut = replace(factories.trajectory(2), **change)
    persist_many(store, stage, [whole, AttemptFinished(phase=Phase.EXPLORE, trajectory=cut)])
    void = store.cycles.get(stage.cycle_id).digest_claim_void
    assert said in void
    assert cut.id in void


def test_progress_is_no_flood(store: Store, stage: m.Stage) -> None:
    with Recorder(store, stage, progress_s=60) as recorder:
        for done in range(1, 101):
            recorder.record(Progress(phase=Phase.EXPLORE, done=done, total=100))
    assert store.stages.get(stage.id or 0).progress_done == 100  # the last one is always shown
    assert [e.payload["done"] for e in store.events.after(0) if e.kind == m.EventKind.PROGRESS] == [1, 100]


def test_finished_attempts_survive_a_stop(store: Store, stage: m.Stage) -> None:
    def stopped() -> None:
        with Recorder(store, stage) as recorder:
            recorder.record(AttemptFinished(phase=Phase.EXPLORE, trajectory=factories.trajectory(1)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert store.trajectories.count(TrajectoryFilter()) == 1


def test_240_attempts_are_stored_quickly(store: Store, stage: m.Stage) -> None:
    attempts = [AttemptFinished(phase=Phase.EXPLORE, trajectory=factories.trajectory(n, turns=10)) for n in range(240)]
    persist_many(store, stage, attempts[:2])  # connections and caches are warm
    times = []
    for _ in range(3):
        start = time.perf_counter()
        persist_many(store, stage, attempts)
        times.append(time.perf_counter() - start)
    assert store.trajectories.count(TrajectoryFilter(stage_id=stage.id)) == 240
    assert min(times) < 1.0, times  # 0.15 s on an idle core; the rest is for a busy machine
    print(f"240 attempts, 2400 turns: {min(times) * 1000:.0f} ms")


def test_gate_checks_do_not_count_as_progress(store: Store, stage: m.Stage) -> None:
    only_gate = factories.trajectory(1, passed=False)
    checks = tuple(
        replace(c, status=CheckStatus.FAILED if c.role is CheckRole.GATE else CheckStatus.PASSED)
        for c in only_gate.checks
    )
    persist(store, stage, AttemptFinished(phase=Phase.EXPLORE, trajectory=replace(only_gate, checks=checks)))
    row = store.trajectories.get(only_gate.id)
    assert (row.progress, row.n_checks, row.strict, row.only_gate_failed) == (2, 2, False, True)
