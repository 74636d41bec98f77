"""Rows of a laboratory that has run for a year, made inside Postgres: `fill(engine, trajectories=1_000_000, …)`.

Everything is INSERT … SELECT over generate_series; the secondary indexes of `trajectory` are made after its rows, as a
restored backup would. The figures are plausible and follow from the row's number, so two fillings are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine, text

STAGES = ("Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2")
FAMILIES, TASKS = 46, 400
LONG = "long0000"
"""Id of the trajectory with 5,000 turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    trajectories: int = 1_000_000
    runbooks: int = 10_000
    cycles: int = 200
    turns: int = 5_000  # of the long trajectory

    @classmethod
    def scaled(cls, scale: float) -> Size:
        """`scale` 1 is the full size."""
        return cls(
            trajectories=max(2_000, int(1_000_000 * scale)),
            runbooks=max(200, int(10_000 * scale)),
            cycles=max(4, int(200 * scale)),
        )


# Numbers in braces are of `Size`. In every statement `i` is the row's number.
PEOPLE = """
INSERT INTO users (login, name, email, roles, preferences)
SELECT 'person-' || i, 'Person ' || i, '', ARRAY['reviewer'], '{{}}' FROM generate_series(1, 30) i
"""
SUITES = """
INSERT INTO suite (name, version, digest, split, n_tasks, path)
SELECT 'suite-' || i, '1', repeat(i::text, 64), 'held_out', {tasks}, '' FROM generate_series(1, 3) i;
INSERT INTO task (suite_id, task_id, family, stratum, instruction, digest, categories, checks, max_turns, nop_progress, path)
SELECT s.id, 'task-' || i, 'family-' || i % {families}, (ARRAY['easy','medium','hard'])[1 + i % 3],
  'Put the files in order, then write what you did into notes.txt.', md5(i::text), '["files"]', '[]', 40, 0, ''
FROM suite s, generate_series(0, {tasks} - 1) i
"""
CYCLES = """
INSERT INTO cycle (name, recipe, config, config_digest, seed, state, desired_state, base_checkpoint, code_version,
  environment, estimate, digest_claim_void, error, created_by, created_at, started_at, finished_at)
SELECT 'cycle ' || i, 'demo', '{{"name": "demo", "rounds": 2}}', md5(i::text), i,
  CASE WHEN i % 40 = 0 THEN 'failed' WHEN i % 50 = 1 THEN 'suspended' ELSE 'done' END, 'run', 'shipped', '0.1',
  '{{}}', '{{}}', '', '', 'person-1', now() - (({cycles} - i) || ' hours')::interval,
  now() - (({cycles} - i) || ' hours')::interval, now() - (({cycles} - i) || ' hours')::interval + '40 minutes'
FROM generate_series(1, {cycles}) i;
INSERT INTO arm (cycle_id, name, from_stage, overrides, retained) SELECT id, 'main', '', '{{}}', true FROM cycle;
INSERT INTO stage (cycle_id, index, kind, round, arm, name, plan, state, phase, progress_done, progress_total,
  progress_text, attempt, expected_s, error, started_at, finished_at)
SELECT c.id, i, (ARRAY['base','rsr','rpr','rsr','rpr'])[i + 1], (i + 1) / 2, 'main',
  (ARRAY['Base','RSR-1','RPR-1','RSR-2','RPR-2'])[i + 1], '{{}}',
  CASE WHEN c.state = 'suspended' AND i = 1 THEN 'suspended' ELSE 'done' END, 'evaluate', 10, 10, '', 1, 480, '',
  c.started_at + (i * 8 || ' minutes')::interval, c.started_at + (i * 8 + 8 || ' minutes')::interval
FROM cycle c, generate_series(0, 4) i;
INSERT INTO stage_phase (stage_id, phase, state, total, facts, attempt, started_at, finished_at)
SELECT s.id, p, 'done', 10, '{{"attempts": 24}}', 1, s.started_at, s.finished_at
FROM stage s, unnest(ARRAY['calibrate', 'joint', 'evaluate']) p;
INSERT INTO checkpoint (cycle_id, stage_id, arm, name, path, actor_digest, critic_digest, actor_parent_id,
  critic_parent_id, retained, parent_kept, metrics)
SELECT s.cycle_id, s.id, 'main', s.name, '', md5('a' || s.id), CASE WHEN s.index > 1 THEN md5('c' || s.id / 2) END,
  NULL, NULL, true, false, '{{}}'
FROM stage s ORDER BY s.id;
UPDATE checkpoint c SET actor_parent_id = p.id, critic_parent_id = CASE WHEN p.critic_digest IS NOT NULL THEN p.id END
FROM checkpoint p WHERE p.cycle_id = c.cycle_id AND p.stage_id = c.stage_id - 1
"""
METRICS = """
INSERT INTO step_metric (stage_id, phase, step, name, value)
SELECT s.id, p, i, metric, -1.0 / (i + 1) + 0.01 * (s.id % 7)
FROM stage s, unnest(ARRAY['calibrate', 'joint']) p, generate_series(1, CASE WHEN p = 'joint' THEN 40 ELSE 4 END) i,
  unnest(ARRAY['critic/vf_explained_var', 'rollout/success', 'train/loss', 'actor/grad_norm', 'critic/grad_norm',
    'train/entropy', 'train/train_rollout_logprob_abs_diff', 'rollout/turns']) metric
WHERE s.kind = 'rpr'
"""
EVALUATIONS = """
INSERT INTO evaluation (cycle_id, stage_id, checkpoint_id, checkpoint, suite, suite_digest, suite_version, k, passed,
  attempts, verdicts, turns, tokens, wall_s, settings, reference_only)
SELECT c.cycle_id, c.stage_id, c.id, c.name, su.name, su.digest, '1', 3, 0, {tasks} / 4 * 3, {tasks} / 4 * 3, 4000,
  900000, 300, '{{"harness": "shell", "temperature": 0.6}}', false
FROM checkpoint c, suite su WHERE su.id < 3;
INSERT INTO evaluation_task (evaluation_id, task_id, family, stratum, passed, attempts, verdict_count, verdicts,
  checks_passed, checks_total)
SELECT e.id, 'task-' || i, 'family-' || i % {families}, (ARRAY['easy','medium','hard'])[1 + i % 3], w.n, 3, 3,
  jsonb_build_array(CASE WHEN w.n > 0 THEN 'passed' ELSE 'failed' END, CASE WHEN w.n > 1 THEN 'passed' ELSE 'failed' END,
    CASE WHEN w.n > 2 THEN 'passed' ELSE 'failed' END),
  jsonb_build_array(5 * (w.n > 0)::int, 5 * (w.n > 1)::int, 5 * (w.n > 2)::int), 5
FROM evaluation e, generate_series(0, {tasks} / 4 - 1) i,
  LATERAL (SELECT (i * 7 + e.checkpoint_id * (1 + i % 5)) % 4 AS n) w;
UPDATE evaluation e SET passed = t.passed
FROM (SELECT evaluation_id, sum(passed) AS passed FROM evaluation_task GROUP BY 1) t WHERE t.evaluation_id = e.id
"""
TRAJECTORIES = """
INSERT INTO trajectory (id, cycle_id, stage_id, phase, step, checkpoint_id, suite, task_id, family, stratum, attempt,
  seed, verdict, end_reason, strict, progress, n_checks, only_gate_failed, nop_progress, n_turns, n_segments, n_tokens,
  n_sampled, reward, runbook_id, flags, boundaries, drift_tokens, weight_version, duration_s, sampler_s, sandbox_s,
  verifier_log, created_at)
SELECT CASE WHEN i = 1 THEN '{long}' ELSE lpad(to_hex(i), 24, '0') END, s.cycle_id, s.id,
  CASE WHEN s.kind = 'rpr' THEN (ARRAY['joint','calibrate','evaluate'])[1 + i % 3]
    ELSE (ARRAY['explore','replay','evaluate'])[1 + i % 3] END,
  CASE WHEN s.kind = 'rpr' THEN i % 40 ELSE 0 END, c.id, 'suite-' || 1 + i % 3, 'task-' || i % {tasks},
  'family-' || i % {tasks} % {families}, (ARRAY['easy','medium','hard'])[1 + i % {tasks} % 3], i % 8, i,
  v.verdict, CASE WHEN v.verdict = 'passed' THEN 'done' WHEN i % 2 = 0 THEN 'turn_cap' ELSE 'token_cap' END,
  v.verdict = 'passed', i % 6, 5, i % 97 = 0, 0, CASE WHEN i = 1 THEN {turns} ELSE 3 + i % 60 END, 1, 400 + i % 9000,
  100 + i % 3000, (i % 20) / 10.0, CASE WHEN i % 120 = 3 THEN md5('book' || i / 120) END,
  CASE WHEN i % 211 = 0 THEN '["broke_verifier"]'::jsonb ELSE '[]'::jsonb END, '{{"extended": 5}}', 0, s.name, 12.5, 9, 3,
  CASE WHEN i % 10 = 0 THEN repeat('assert ok' || chr(10), 20) ELSE '' END,
  now() - (({trajectories} - i) / 10 || ' seconds')::interval
FROM generate_series(1, {trajectories}) i
JOIN (SELECT *, row_number() OVER (ORDER BY id) AS n FROM stage) s
  ON s.n = 1 + (i - 1) * 5 * {cycles} / {trajectories}
JOIN checkpoint c ON c.stage_id = s.id,
LATERAL (SELECT CASE WHEN i % 1000 * 7919 % 100 < 45 THEN 'passed' WHEN i % 1000 * 7919 % 100 < 97 THEN 'failed'
  ELSE 'verifier_error' END AS verdict) v
"""
INSIDE = """
INSERT INTO turn (trajectory_id, index, action, observation, timed_out, segment, start, "end", duration_s, exit_code)
SELECT '{long}', i, 'grep -rn "needle" part-' || i || ' | head', repeat('line of output ' || i || chr(10), 4 + i % 9), false,
  i / 400, i * 20, i * 20 + 12, 0.4, 0 FROM generate_series(0, {turns} - 1) i;
INSERT INTO segment (trajectory_id, index, kind, n_tokens, n_sampled, weight_versions)
SELECT '{long}', i, 'policy', 8000, 3000, '["v1"]' FROM generate_series(0, {turns} / 400) i;
INSERT INTO check_result (trajectory_id, index, check_id, role, status, message)
SELECT id, i, 'check-' || i, CASE WHEN i = 0 THEN 'gate' ELSE 'scenario' END,
  CASE WHEN (seq + i) % 3 = 0 THEN 'failed' ELSE 'passed' END, ''
FROM trajectory, generate_series(0, 4) i WHERE seq % 20 = 0 OR id = '{long}'
"""
RUNBOOKS = """
INSERT INTO runbook (id, revision, cycle_id, stage_id, task_id, source_trajectory_id, planner, author, lines, raw_text,
  state)
SELECT md5('book' || i), 1, s.cycle_id, s.id, 'task-' || i % {tasks},
  lpad(to_hex(2 + i * ({trajectories} / {runbooks} - 1)), 24, '0'), 'Base', '',
  '[{{"text": "List the files and sort them by date", "cites": [0, 2]}}, {{"text": "Write the names into notes.txt", "cites": [3]}}]',
  '', CASE WHEN s.state = 'suspended' THEN (ARRAY['waiting','approved','waiting','rejected'])[1 + i % 4]
    WHEN i % 3 = 0 THEN 'rejected' ELSE 'consumed' END
FROM generate_series(0, {runbooks} - 1) i
JOIN (SELECT *, row_number() OVER (ORDER BY (state = 'suspended') DESC, id) AS n FROM stage WHERE kind = 'rsr') s
  ON s.n = 1 + i * 2 * {cycles} / {runbooks};
INSERT INTO review (key, runbook_id, revision, reviewer, decision, reason)
SELECT md5(r.id || w), r.id, 1, w, CASE WHEN r.state = 'rejected' THEN 'reject' ELSE 'approve' END, ''
FROM runbook r, unnest(ARRAY['rules', 'person:person-' || 1 + length(r.task_id) % 5]) w
WHERE w = 'rules' OR r.state <> 'waiting';
INSERT INTO finding (review_id, runbook_id, revision, part, severity, rule, message, line, start, "end", evidence,
  evidence_source)
SELECT id, runbook_id, 1, 'artifact', 'soft', 'artifact.read-value', 'holds a value that must be read', 1, 0, 5, 'Write',
  'turn 2' FROM review WHERE reviewer = 'rules' AND id % 3 = 0
"""
LEDGER = """
INSERT INTO event (cycle_id, stage_id, kind, payload)
SELECT s.cycle_id, s.id, CASE WHEN i = 0 THEN 'cycle.state' WHEN i = 7 THEN 'alarm' ELSE 'progress' END,
  '{{"state": "running", "rule": "ev", "text": "explained variance below 0"}}' FROM stage s, generate_series(0, 99) i;
INSERT INTO log_line (cycle_id, stage_id, level, logger, text)
SELECT s.cycle_id, s.id, CASE WHEN i = 150 THEN 40 WHEN i % 25 = 0 THEN 30 ELSE 20 END, 'rsi', 'step ' || i || ' done'
FROM stage s, generate_series(1, 200) i;
INSERT INTO audit_log (actor, action, object_kind, object_id, payload)
SELECT 'person-' || i % 30, (ARRAY['runbook.approve','cycle.pause','sign-in'])[1 + i % 3],
  (ARRAY['runbook','cycle',''])[1 + i % 3], (i % 5000)::text, '{{"reason": "fits"}}' FROM generate_series(1, {runbooks} * 5) i;
INSERT INTO notice (event_id, kind, cycle_id, text, payload)
SELECT min(id), 'cycle.done', cycle_id, 'Cycle ' || cycle_id || ' is done.', '{{}}' FROM event GROUP BY cycle_id;
INSERT INTO inbox_item (user_id, notice_id) SELECT u.id, n.id FROM users u, notice n;
INSERT INTO experiment (name, spec, spec_digest, created_by) SELECT 'question-' || i, '{{"question": "Does it help?"}}', md5(i::text), 'person-1'
FROM generate_series(1, 40) i;
INSERT INTO experiment_run (experiment_id, arm, seed, position, cycle_id, error)
SELECT e.id, 'arm-' || i % 2, i / 2, i % 2, 1 + (e.id * 6 + i) % {cycles}, '' FROM experiment e, generate_series(0, 5) i
"""
PARTS = (
    *(("people", PEOPLE), ("suites", SUITES), ("cycles", CYCLES), ("metrics", METRICS), ("evaluations", EVALUATIONS)),
    *(("trajectories", TRAJECTORIES), ("inside", INSIDE), ("runbooks", RUNBOOKS), ("ledger", LEDGER)),
)


def fill(engine: Engine, size: Size) -> None:
    """Fill an empty, migrated database, then ANALYZE it."""
    numbers = {
        "trajectories": size.trajectories,
        "runbooks": size.runbooks,
        "cycles": size.cycles,
        "turns": size.turns,
        "families": FAMILIES,
        "tasks": TASKS,
        "long": LONG,
    }
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET maintenance_work_mem = '512MB'"))
        connection.execute(text("SET synchronous_commit = off"))
        dropped = _drop_secondary(connection)
        for name, statements in PARTS:
            if name == "inside":
                for definition in dropped:
                    connection.exec_driver_sql(definition)
            for statement in statements.format(**numbers).split(";\n"):
                connection.exec_driver_sql(statement.replace("%", "%%"))
        connection.execute(text("VACUUM (ANALYZE)"))


def _drop_secondary(connection: object) -> list[str]:
    """Definitions of the indexes of `trajectory` that hold no constraint; they are dropped."""
    rows = connection.exec_driver_sql(  # type: ignore[attr-defined]
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'trajectory' AND indexname LIKE 'ix_%%'"
    ).all()
    for name, _ in rows:
        connection.exec_driver_sql(f'DROP INDEX "{name}"')  # type: ignore[attr-defined]
    return [definition for _, definition in rows]
