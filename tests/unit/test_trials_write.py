"""Our attempts as Harbor job folders: what is written is read back, has Harbor's shape, and holds no secret."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.domain import CheckStatus, EndReason, Trajectory, Turn, Verdict
from stages.errors import TrialError
from stages.trials.atif import atif_documents, redacted
from stages.trials.ctrf import read_checks
from stages.trials.harbor import dataset_versions, find_trials, read_trial
from stages.trials.transcript import parse_transcript, read_transcript
from stages.trials.write import ExportJob, ExportTrial, write_job
from tests import factories

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
JOB = ExportJob(
    name="job", model="RPR-2", suite="held-out", suite_version="3", version="1.0", settings={"harness": "shell", "k": 2}
)
ENDS = [
    (Verdict.PASSED, EndReason.DONE),
    (Verdict.FAILED, EndReason.TURN_CAP),
    (Verdict.FAILED, EndReason.TOKEN_CAP),
    (Verdict.PASSED, EndReason.TIME_LIMIT),
    (Verdict.FAILED, EndReason.CONTEXT_OVERFLOW),
    (Verdict.VERIFIER_ERROR, EndReason.DONE),
    (Verdict.INFRA_ERROR, EndReason.ERROR),
    (Verdict.NONE, EndReason.CANCELLED),
]


def export(trajectory: Trajectory) -> ExportTrial:
    return ExportTrial(
        trajectory=trajectory, instruction="Write x.", task_digest=f"d-{trajectory.task_id}", finished=NOW
    )


def several() -> list[Trajectory]:
    made = [factories.trajectory(n, passed=v is Verdict.PASSED, end=e, turns=3) for n, (v, e) in enumerate(ENDS)]
    return [
        replace(t, verdict=v, checks=t.checks if v.counts else (), verifier_log="" if v.counts else "it broke")
        for t, (v, _) in zip(made, ENDS, strict=True)
    ]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    whole = several()
    whole[0] = replace(
        whole[0],
        turns=(
            Turn(index=0, action="ls", observation="x", exit_code=0, end=3, duration_s=1.5),
            Turn(index=1, action="sleep 9", observation="err timeout", exit_code=None, timed_out=True, start=5, end=9),
            Turn(index=2, action='{"commands": []}', observation="screen", exit_code=None, segment=4, end=4),
            Turn(index=3, action="done", observation="", exit_code=None, segment=4, start=6, end=8),
        ),
        checks=(*whole[0].checks, replace(whole[0].checks[0], id="skipped", status=CheckStatus.NOT_RUN)),
    )
    assert write_job(tmp_path / "job", JOB, map(export, whole)) == len(whole)
    found = find_trials(tmp_path)
    assert found.problems == ()
    trials = {read_trial(p).folder.name.rpartition("-")[2]: read_trial(p) for p in found.trials}
    assert set(trials) == {t.id for t in whole}
    for t in whole:
        trial = trials[t.id]
        assert (trial.task, trial.verdict, trial.end_reason) == (t.task_id, t.verdict, t.end_reason)
        assert (trial.task_digest, trial.source, trial.model) == (f"d-{t.task_id}", "held-out", "RPR-2")
        assert trial.duration_s == pytest.approx(t.duration_s)
        assert read_checks(trial.folder) == t.checks
        turns = read_transcript(trial.folder).turns
        assert [(x.index, x.action, x.observation) for x in turns] == [
            (x.index, x.action, x.observation) for x in t.turns
        ]
    segments = [turn.segment for turn in read_transcript(trials[whole[0].id].folder).turns]
    assert segments == [0, 0, 1, 1]
    assert dataset_versions(tmp_path / "job") == {"held-out": "3"}
    assert trials[whole[0].id].settings["agent.k"] == 2


# The required fields and their kinds, as Harbor 0.26's own pydantic models have them (TrialResult, TrialConfig, JobResult,
# Trajectory 1.8, which forbids unknown fields of a step); this export was validated with those models when it was written.
RESULT: dict[str, Any] = {
    "id": uuid.UUID, "task_name": str, "trial_name": str, "trial_uri": str, "task_id": dict, "task_checksum": str,
    "config": dict, "agent_info": dict, "started_at": datetime.fromisoformat, "finished_at": datetime.fromisoformat,
}  # fmt: skip
STEP = {
    "step_id",
    "timestamp",
    "source",
    "model_name",
    "message",
    "tool_calls",
    "observation",
    "metrics",
    "llm_call_count",
}
ROOT = {"schema_version", "session_id", "agent", "steps", "final_metrics", "continued_trajectory_ref"}


def test_it_has_harbors_shape(tmp_path: Path) -> None:
    write_job(tmp_path / "job", JOB, map(export, several()))
    document = json.loads((tmp_path / "job/result.json").read_text())
    uuid.UUID(document["id"])
    assert document["n_total_trials"] == document["stats"]["n_completed_trials"] == len(ENDS)
    assert (document["stats"]["n_errored_trials"], document["stats"]["n_cancelled_trials"]) == (5, 1)
    (own,) = document["stats"]["evals"].values()
    assert own["n_trials"] == 5
    assert own["metrics"] == [{"mean": 2 / 5}]
    assert {k: len(v) for k, v in own["reward_stats"]["reward"].items()} == {"1.0": 2, "0.0": 3}
    assert {"job_name", "agents", "datasets"} <= set(json.loads((tmp_path / "job/config.json").read_text()))
    for path in find_trials(tmp_path).trials:
        result = json.loads((path / "result.json").read_text())
        for name, kind in RESULT.items():
            assert result[name] is not None, name
            assert isinstance(result[name], kind) if kind in (str, dict) else kind(result[name])
        assert result["task_id"]["path"]
        assert result["config"] == json.loads((path / "config.json").read_text())
        assert {"name", "version"} <= set(result["agent_info"])
        error = result["exception_info"]
        assert error is None or set(error) == {
            "exception_type",
            "exception_message",
            "exception_traceback",
            "occurred_at",
        }
        reward = path / "verifier/reward.txt"
        assert reward.exists() is (result["verifier_result"] is not None)
        if reward.exists():
            assert float(reward.read_text()) == result["verifier_result"]["rewards"]["reward"]
        for file in (path / "agent").iterdir():
            shaped(json.loads(file.read_text()))


def shaped(document: dict[str, Any]) -> None:
    assert set(document) <= ROOT
    assert document["schema_version"] == "ATIF-v1.8"
    assert document["final_metrics"]["total_steps"] == len(document["steps"]) > 0
    for n, step in enumerate(document["steps"], 1):
        assert set(step) <= STEP
        assert step["step_id"] == n
        assert isinstance(step["message"], str)
        if step["source"] != "agent":
            assert not {"model_name", "tool_calls", "metrics"} & set(step)
        calls = {c["tool_call_id"] for c in step.get("tool_calls", [])}
        for result in step.get("observation", {}).get("results", []):
            assert result.get("source_call_id", None) in {None, *calls}


def test_no_secret_leaves(tmp_path: Path) -> None:
    secret = "sk-proj-abcdefghijklmnopqrstuvwxyz0123"
    t = factories.trajectory(1, passed=False, turns=2)
    t = replace(
        t,
        turns=(
            replace(t.turns[0], action=f"export OPENAI_API_KEY={secret}", observation=f"key {secret}\n"),
            t.turns[1],
        ),
        checks=(replace(t.checks[0], message=f"found {secret}"),),
        verifier_log=f"log {secret}",
    )
    write_job(tmp_path / "job", JOB, [export(t)])
    text = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert secret not in text
    assert text.count("[secret removed]") == 4
    assert redacted(f"use {secret}", f"the key is {secret}") == f"use {secret}"  # the task itself gives it


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def breaks():
        yield export(factories.trajectory(1))
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_job(tmp_path / "job", JOB, breaks())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TrialError, match="no attempt"):
        write_job(tmp_path / "job", JOB, [])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "job").mkdir()
    assert write_job(tmp_path / "job", JOB, [export(factories.trajectory(1))]) == 1  # an empty folder is filled
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(TrialError, match="nothing is overwritten"):
        write_job(tmp_path / "job", JOB, [export(factories.trajectory(2))])
    assert sorted(p for p in tmp_path.rglob("*")) == before
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(TrialError, match="nothing is overwritten"):
        write_job(tmp_path / "link", JOB, [export(factories.trajectory(2))])


TEXT = st.text(max_size=40)


@given(st.lists(st.tuples(TEXT, TEXT, st.none() | st.integers(0, 255), st.integers(0, 2)), max_size=5))
def test_any_text_survives(rows: list[tuple[str, str, int | None, int]]) -> None:
    turns = [
        Turn(index=n, action=a, observation=o, exit_code=code, segment=segment)
        for n, (a, o, code, segment) in enumerate(sorted(rows, key=lambda r: r[3]))
    ]
    documents = atif_documents(
        turns, session_id="s", agent="a", version="1", model="m", instruction="i", started=NOW, clean=lambda text: text
    )  # fmt: skip
    back: list[Turn] = []
    for n, document in enumerate(documents.values()):
        shaped(document)
        back += parse_transcript(json.loads(json.dumps(document)), "x", segment=n, first=len(back)).turns
    assert [(t.action, t.observation) for t in back] == [(t.action, t.observation) for t in turns]
