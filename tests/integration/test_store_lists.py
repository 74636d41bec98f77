"""Lists page by key, and no filter reads the whole table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields

import pytest
import sqlalchemy as sa

from orchestrator import models as m
from orchestrator.persist import persist_many
from orchestrator.store import Store, TrajectoryFilter
from orchestrator.store.logs import NewLine
from stages.domain import EndReason, Phase, Stratum, Verdict
from stages.errors import ConfigError
from stages.records import AttemptFinished
from tests import factories

ROWS = 20_000
# One value per filter that few rows have, as rows 1…9 of the big table do.
RARE: dict[str, object] = {
    "cycle_id": 2,
    "stage_id": 2,
    "phase": Phase.JOINT,
    "step": 7,
    "checkpoint_id": 1,
    "suite": "rare",
    "task_id": "rare",
    "family": "rare",
    "stratum": Stratum.EXTREME,
    "verdict": Verdict.VERIFIER_ERROR,
    "end_reason": EndReason.CONTEXT_OVERFLOW,
    "runbook_id": "rare",
    "only_gate_failed": True,
    "flagged": True,
}
TOGETHER = [  # what pages ask for at once; `phase` and `step` come with their stage
    {"stage_id", "phase"},
    {"stage_id", "phase", "step"},
    {"cycle_id", "verdict"},
    {"suite", "task_id"},
    {"checkpoint_id", "suite"},
    *({name} for name in sorted(set(RARE) - {"phase", "step", "suite"})),
]


@pytest.fixture(scope="module")
def big(module_store: Store) -> Store:
    """20,000 attempts of cycle 1; nine of them differ in everything."""
    store = module_store
    for _ in range(2):
        cycle_id = factories.cycle(store).id
        store.stages.plan(cycle_id or 0, [m.Stage(cycle_id=cycle_id, index=0, kind=m.StageKind.BASE, name="Base")])
    store.checkpoints.save(m.Checkpoint(cycle_id=1, name="Base", actor_digest="a"))
    fill = """
        INSERT INTO trajectory (id, cycle_id, stage_id, phase, step, suite, task_id, family, stratum, attempt, seed,
          verdict, end_reason, strict, progress, n_checks, only_gate_failed, nop_progress, n_turns, n_segments, n_tokens,
          n_sampled, flags, boundaries, drift_tokens, weight_version, duration_s, sampler_s, sandbox_s, verifier_log)
        SELECT 'id' || i, 1, 1, 'explore', i % 5, 'train', 'task-' || i % 40, 'family-' || i % 10, 'easy', 0, i,
          CASE WHEN i % 3 = 0 THEN 'passed' ELSE 'failed' END, 'done', i % 3 = 0, 1, 2, false, 0, 8, 1, 400, i, '[]',
          '{}', 0, 'v', 1, 1, 1, '' FROM generate_series(1, :rows) AS i
    """
    rare = """
        UPDATE trajectory SET cycle_id = 2, stage_id = 2, phase = 'joint', step = 7, suite = 'rare', task_id = 'rare',
          family = 'rare', stratum = 'extreme', verdict = 'verifier_error', strict = false,
          end_reason = 'context_overflow', only_gate_failed = true, flags = '["broke_verifier"]', runbook_id = 'rare',
          checkpoint_id = 1 WHERE seq < 10
    """
    with store.transaction() as session:
        session.execute(sa.text(fill), {"rows": ROWS})
        session.execute(sa.text(rare))
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE trajectory"))
    return store


def _rows_read(plan: dict) -> int:
    """Rows that a plan touched, thrown away ones included."""
    own = plan.get("Actual Rows", 0) + plan.get("Rows Removed by Filter", 0) if "Relation Name" in plan else 0
    return int(own) + sum(_rows_read(child) for child in plan.get("Plans", []))


def _explain(store: Store, statements: list[tuple[str, object]]) -> int:
    """Run recorded statements again under EXPLAIN; returns the rows that they read."""
    read = 0
    with store.engine.connect() as connection:
        for statement, parameters in statements:
            raw = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).scalar_one()
            read += _rows_read((raw if isinstance(raw, list) else json.loads(raw))[0]["Plan"])
    return read


@pytest.fixture
def statements(big: Store) -> Iterator[list[tuple[str, object]]]:
    seen: list[tuple[str, object]] = []

    def note(connection, cursor, statement, parameters, context, executemany) -> None:
        if statement.startswith("SELECT"):
            seen.append((statement, parameters))

    sa.event.listen(big.engine, "before_cursor_execute", note)
    yield seen
    sa.event.remove(big.engine, "before_cursor_execute", note)


def test_rare_values_cover_every_filter() -> None:
    assert set(RARE) == {field.name for field in fields(TrajectoryFilter)}
    assert set().union(*TOGETHER) == set(RARE)


@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_no_list_reads_the_whole_table(big: Store, statements: list, names: set[str]) -> None:
    where = TrajectoryFilter(**{name: RARE[name] for name in names})  # type: ignore[arg-type]
    found = big.trajectories.list(where)
    assert [row.seq for row in found.items] == list(range(9, 0, -1))
    assert found.next is None
    assert big.trajectories.count(where) == 9
    assert _explain(big, statements) < 200


def test_first_pages_read_little(big: Store, statements: list) -> None:
    for where in (TrajectoryFilter(), TrajectoryFilter(cycle_id=1), TrajectoryFilter(verdict=Verdict.PASSED)):
        assert len(big.trajectories.list(where).items) == 50
    top = big.trajectories.expensive_failures(TrajectoryFilter(), limit=10)
    assert [row.n_sampled for row in top] == sorted((row.n_sampled for row in top), reverse=True)
    assert all(not row.strict for row in top)
    big.trajectories.expensive_failures(TrajectoryFilter(cycle_id=1), limit=10)
    assert _explain(big, statements) < 500


def test_pages_meet_without_gap_or_overlap(big: Store) -> None:
    where, before, seen = TrajectoryFilter(family="family-3"), None, []
    while True:
        found = big.trajectories.list(where, before=before, limit=333)
        seen += [row.seq for row in found.items]
        if (before := found.next) is None:
            break
    assert seen == sorted(seen, reverse=True)
    assert len(seen) == len(set(seen)) == big.trajectories.count(where) == sum(i % 10 == 3 for i in range(10, ROWS + 1))
    assert big.trajectories.count(TrajectoryFilter(), cap=100) == 101


def test_success_keeps_both_denominators(store: Store) -> None:
    cycle_id = factories.cycle(store).id or 0
    stage = store.stages.start(factories.stages(store, cycle_id)[1].id or 0)
    attempts = [AttemptFinished(phase=Phase.EXPLORE, trajectory=factories.trajectory(n)) for n in range(6)]
    persist_many(store, stage, attempts)
    with store.transaction() as session:
        session.execute(sa.text("UPDATE trajectory SET verdict = 'infra_error', strict = false WHERE attempt = 1"))
    (row,) = store.trajectories.success(cycle_id)
    assert (row.phase, row.step, row.suite) == (Phase.EXPLORE, 0, "train")
    assert (row.passed, row.verdicts, row.attempts) == (2, 4, 6)


def test_searching_turns(store: Store) -> None:
    cycle_id = factories.cycle(store).id or 0
    stage = store.stages.start(factories.stages(store, cycle_id)[1].id or 0)
    t = factories.trajectory(1, turns=30)
    persist_many(store, stage, [AttemptFinished(phase=Phase.EXPLORE, trajectory=t)])
    assert store.trajectories.search_turns(t.id, "ECHO 2") == [2, *range(20, 30)]
    assert store.trajectories.search_turns(t.id, "echo %") == []
    part = store.trajectories.detail(t.id, first_turn=10, turns=5)
    assert [turn.index for turn in part.turns] == [10, 11, 12, 13, 14]


def test_cycles_and_checkpoints(store: Store) -> None:
    ids = [factories.cycle(store, name).id for name in ("alpha", "beta", "Alphabet")]
    store.cycles.set_state(ids[1] or 0, m.CycleState.RUNNING)
    assert [c.name for c in store.cycles.list(text="ALPHA").items] == ["Alphabet", "alpha"]
    assert [c.name for c in store.cycles.list(states=[m.CycleState.RUNNING]).items] == ["beta"]
    first = store.cycles.list(limit=2)
    assert [c.name for c in store.cycles.list(limit=2, before=first.next).items] == ["alpha"]
    rows = factories.stages(store, ids[0] or 0)
    assert factories.stages(store, ids[0] or 0) == rows  # planning twice changes nothing
    assert [len(s) for s in store.stages.of_cycles([i for i in ids if i]).values()] == [5, 0, 0]
    found = store.stages.named(ids[0] or 0, "rpr-1")
    assert found is not None
    assert found.name == "RPR-1"


def test_logs(store: Store) -> None:
    cycle_id = factories.cycle(store).id or 0
    store.logs.append(cycle_id, [NewLine(level=40 if n == 7 else 20, text=f"line {n}\x00") for n in range(10)])
    lines = store.logs.read(cycle_id, limit=3)
    assert [line.text for line in lines] == ["line 7␀", "line 8␀", "line 9␀"]
    assert [line.text for line in store.logs.read(cycle_id, before=lines[0].id, limit=1)] == ["line 6␀"]
    assert store.logs.read(cycle_id, after=lines[-1].id or 0) == []
    first = store.logs.first_error(cycle_id)
    assert first is not None
    assert (first.id, len(list(store.logs.everything(cycle_id, batch=4)))) == (lines[0].id, 10)


def test_people(store: Store) -> None:
    anna = store.users.add("anna", [m.Role.LEAD, m.Role.REVIEWER])
    store.users.add("ben", [m.Role.ANALYST])
    with pytest.raises(ConfigError, match="taken"):
        store.users.add("anna", [])
    with pytest.raises(ConfigError, match="no login"):
        store.users.add("../x", [])
    assert [u.login for u in store.users.list(role=m.Role.REVIEWER)] == ["anna"]
    store.users.set_disabled(anna.id or 0, True)
    assert [u.login for u in store.users.list()] == ["ben"]
    for n in range(3):
        store.audit_trail.add("anna", "cycle.pause", object_kind="cycle", object_id=n)
    page = store.audit_trail.list(actor="anna", limit=2)
    assert [row.object_id for row in page.items] == ["2", "1"]
    assert [row.object_id for row in store.audit_trail.list(actor="anna", before=page.next).items] == ["0"]
