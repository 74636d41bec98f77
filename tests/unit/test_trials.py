"""Other people's trials are read exactly, or refused with the name of the file."""

import json
import os
from functools import reduce
from pathlib import Path

import pytest

from stages.domain import CheckStatus, EndReason, Stratum, Trajectory, Verdict
from stages.errors import TrialError
from stages.trials.ctrf import parse_checks, read_checks
from stages.trials.harbor import dataset_versions, find_trials, read_trial, trajectory_of
from stages.trials.transcript import Transcript, parse_transcript, read_transcript
from tests import trials as t


def whole(folder: Path) -> Trajectory:
    known = {"id": "x", "attempt": 0, "suite": "s", "family": "f", "stratum": Stratum.HARD, "checkpoint": "c"}
    return trajectory_of(read_trial(folder), read_transcript(folder), **known)  # type: ignore[arg-type]


def test_a_trial_becomes_an_attempt(tmp_path: Path) -> None:
    found = whole(t.trial(tmp_path, "a", 3, checks=("passed", "passed"), transcript=t.atif()))
    assert (found.verdict, found.end_reason, found.progress) == (Verdict.PASSED, EndReason.DONE, 2)
    assert found.duration_s == 60.0
    assert [(x.action, x.observation, x.duration_s) for x in found.turns] == [
        ("Look first.\nls", "x.txt", 5.0),
        ("Done\n[image]", "", 0.0),
    ]


@pytest.mark.parametrize("minor", range(9))
def test_every_atif_version_is_read(minor: int) -> None:
    found = parse_transcript(t.atif(f"1.{minor}"), "x")
    assert (found.format, len(found.turns), found.output_tokens) == (f"ATIF-v1.{minor}", 2, 11)


@pytest.mark.parametrize("version", ["1.9", "2.0", "1.06x", "1", "1." + "9" * 5000], ids=lambda v: v[:8])
def test_a_newer_atif_is_refused_by_name(version: str) -> None:
    with pytest.raises(TrialError, match="schema_version"):
        parse_transcript(t.atif(version), "x")


@pytest.mark.parametrize(
    "step",
    [
        {"observation": {"results": 5}},
        {"observation": 3, "tool_calls": 5},
        {"tool_calls": [{"function_name": "x", "arguments": reduce(lambda inner, _: {"a": inner}, range(3000), {})}]},
        {"metrics": {"completion_tokens": 10**30}},  # more than any column holds
    ],
)
def test_a_step_of_an_odd_form_is_still_a_turn(step: dict[str, object]) -> None:
    document = {"schema_version": "ATIF-v1.8", "steps": [{"step_id": 1, "source": "agent", "message": "", **step}]}
    found = parse_transcript(document, "t")
    assert len(found.turns) == 1
    assert found.output_tokens is None


def test_copied_context_and_steps_without_a_model_call_are_no_turns() -> None:
    steps = [
        {"step_id": 1, "source": "agent", "message": "old", "is_copied_context": True},
        {"step_id": 2, "source": "agent", "message": "new"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "llm_call_count": 0,
            "observation": {"results": [{"content": "later"}]},
        },
        {"step_id": 4, "source": "system", "message": "", "observation": {"results": [{"content": "reset"}]}},
    ]
    (turn,) = parse_transcript(t.atif("1.7", steps), "x").turns
    assert (turn.action, turn.observation) == ("new", "later\nreset")


def test_continuations_are_segments(tmp_path: Path) -> None:
    folder = t.trial(tmp_path, "a", 0, transcript=t.atif(continued_trajectory_ref="trajectory.cont-1.json"))
    t.write(folder / "agent" / "trajectory.cont-1.json", t.atif())
    found = read_transcript(folder)
    assert [(x.index, x.segment) for x in found.turns] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert found.output_tokens == 22


@pytest.mark.parametrize("reference", ["trajectory.json", "../result.json", "/etc/passwd.json", "gone.json", 7])
def test_continuations_that_lead_astray_are_refused(tmp_path: Path, reference: object) -> None:
    folder = t.trial(tmp_path, "a", 0, transcript=t.atif(continued_trajectory_ref=reference))
    with pytest.raises(TrialError, match="agent/"):
        read_transcript(folder)


def test_chat_messages_are_turns() -> None:
    call = {"function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    odd = {"function": {"name": "bash", "arguments": "{not json"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "I look", "tool_calls": [call, odd]},
        {"role": "tool", "content": "x.txt"},
        {"role": "assistant", "content": None},
    ]
    first, second = parse_transcript(messages, "x").turns
    assert (first.action, first.observation) == ("I look\nls\nbash({not json)", "x.txt")
    assert second.action == ""


def test_no_transcript_is_no_error(tmp_path: Path) -> None:
    assert read_transcript(t.trial(tmp_path, "a", 0)) == Transcript(format="")


@pytest.mark.parametrize(
    ("reward", "exception", "verdict", "end"),
    [
        (1.0, "AgentTimeoutError", Verdict.PASSED, EndReason.TIME_LIMIT),  # timed out and still passed
        (0.0, None, Verdict.FAILED, EndReason.DONE),
        (0.5, None, Verdict.FAILED, EndReason.DONE),  # strict
        (None, None, Verdict.NONE, EndReason.DONE),
        (None, "AgentTimeoutError", Verdict.NONE, EndReason.TIME_LIMIT),
        (None, "VerifierTimeoutError", Verdict.VERIFIER_ERROR, EndReason.DONE),
        (None, "RewardFileNotFoundError", Verdict.VERIFIER_ERROR, EndReason.DONE),
        (None, "EnvironmentStartTimeoutError", Verdict.INFRA_ERROR, EndReason.ERROR),
        (None, "CancelledError", Verdict.NONE, EndReason.CANCELLED),
    ],
)
def test_verdicts(
    tmp_path: Path, reward: float | None, exception: str | None, verdict: Verdict, end: EndReason
) -> None:
    found = read_trial(t.trial(tmp_path, "a", 0, reward=reward, exception=exception))
    assert (found.verdict, found.end_reason) == (verdict, end)


def test_a_failure_that_passed_every_check_is_gate_only(tmp_path: Path) -> None:
    assert whole(t.trial(tmp_path, "a", 0, reward=0.0, checks=("passed", "skipped"))).only_gate_failed
    assert whole(t.trial(tmp_path, "a", 1, reward=1.0, checks=("passed", "failed"))).flags == (
        "failed_checks_but_passed",
    )


def test_statuses_and_repeated_names() -> None:
    document = t.ctrf("passed", "failed", "skipped", "pending", "other")
    for test in document["results"]["tests"]:
        test["name"] = "same"
    found = parse_checks(document, "x")
    assert [c.id for c in found] == ["same", "same#2", "same#3", "same#4", "same#5"]
    assert [c.status for c in found] == [CheckStatus.PASSED, CheckStatus.FAILED, *[CheckStatus.NOT_RUN] * 3]
    assert parse_checks({"results": {"tests": []}}, "x") == ()


@pytest.mark.parametrize(
    "change",
    [
        {"summary": {"tests": 3}},
        {"summary": {"passed": 0}},
        {"tests": None},
        {"tests": [{"name": "", "status": "passed"}]},
        {"tests": [{"name": "x", "status": "won"}]},
        {"tests": [{"name": "x", "status": ["passed"]}]},
        {"tests": ["x"]},
    ],
)
def test_a_damaged_report_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    folder = t.trial(tmp_path, "a", 0)
    document = t.ctrf("passed", "failed")
    t.write(folder / "verifier" / "ctrf.json", {"results": document["results"] | change})
    with pytest.raises(TrialError, match=r"ctrf\.json"):
        read_checks(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"task_name": None},
        {"task_name": "a\x00b"},
        {"task_name": "x" * 301},
        {"agent_info": {}},
        {"verifier_result": {"rewards": {"reward": "much"}}},
        {"verifier_result": {"rewards": {"reward": 1.5}}},
        {"verifier_result": {"rewards": {"a": 1.0, "b": 1.0}}},
        {"verifier_result": {"rewards": {}}},
        {"verifier_result": {"rewards": {"reward": 0.0}}},  # reward.txt says 1
        {"agent_result": {"n_output_tokens": -1}},
        {"started_at": "yesterday"},
    ],
)
def test_a_damaged_result_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    folder = t.trial(tmp_path, "a", 0, **change)  # type: ignore[arg-type]
    with pytest.raises(TrialError, match=r"result\.json"):
        read_trial(folder)


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', "[" * 100_000, '{"n": ' + "9" * 5000 + "}", "[]", "null", "3"])
def test_text_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    folder = t.trial(tmp_path, "a", 0)
    (folder / "result.json").write_text(text, encoding="utf-8")
    with pytest.raises(TrialError, match=r"result\.json"):
        read_trial(folder)


@pytest.mark.parametrize("text", ["", "won", "nan", "inf"])
def test_a_damaged_reward_is_named(tmp_path: Path, text: str) -> None:
    folder = t.trial(tmp_path, "a", 0)
    (folder / "verifier" / "reward.txt").write_text(text, encoding="utf-8")
    with pytest.raises(TrialError, match="verifier"):
        read_trial(folder)


def test_reward_json_is_held_against_the_result(tmp_path: Path) -> None:
    folder = t.trial(tmp_path, "a", 0)
    (folder / "verifier" / "reward.txt").unlink()
    t.write(folder / "verifier" / "reward.json", {"reward": 1})
    assert read_trial(folder).verdict is Verdict.PASSED
    t.write(folder / "verifier" / "reward.json", {"reward": 0})
    with pytest.raises(TrialError, match="one was changed"):
        read_trial(folder)


def test_links_pipes_huge_and_foreign_bytes_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "ctrf.json").write_text(json.dumps(t.ctrf("passed")), encoding="utf-8")
    job = tmp_path / "job"

    linked = t.trial(job, "a", 0)
    (linked / "verifier" / "ctrf.json").unlink()
    (linked / "verifier" / "ctrf.json").symlink_to(secret / "ctrf.json")
    with pytest.raises(TrialError, match="symbolic link"):
        read_checks(linked)

    below = t.trial(job, "a", 1, reward=None)
    (below / "verifier").symlink_to(secret)
    with pytest.raises(TrialError, match="verifier is a symbolic link"):
        read_checks(below)

    huge = t.trial(job, "a", 2)
    os.truncate(huge / "verifier" / "ctrf.json", 1 << 40)  # sparse: nothing is written
    with pytest.raises(TrialError, match="1099511627776 bytes"):
        read_checks(huge)

    pipe = t.trial(job, "a", 3)
    (pipe / "verifier" / "ctrf.json").unlink()
    os.mkfifo(pipe / "verifier" / "ctrf.json")
    with pytest.raises(TrialError, match="no regular file"):
        read_checks(pipe)

    foreign = t.trial(job, "a", 4)
    (foreign / "verifier" / "ctrf.json").write_bytes(b'{"results": "\xff"}')
    with pytest.raises(TrialError, match="not UTF-8"):
        read_checks(foreign)


def test_trials_are_found_and_others_are_named(tmp_path: Path) -> None:
    job = t.job(tmp_path / "jobs", "j", {"a": [1.0, 0.0]})
    early = t.trial(job, "b", 0, reward=None)  # failed before it had an agent or a verifier
    unfinished = t.trial(job, "c", 0)
    (unfinished / "result.json").unlink()
    (job / "link").symlink_to(early)
    (job / "all.zip").write_bytes(b"PK")
    found = find_trials(tmp_path)
    assert [p.name for p in found.trials] == ["a__000", "a__001", "b__000"]
    said = " | ".join(map(str, found.problems))
    assert all(word in said for word in ("c__000", "not finished", "link is a symbolic link", "all.zip is an archive"))
    assert [p.name for p in find_trials(early).trials] == ["b__000"]
    for name, word in (("all.zip", "archive"), ("config.json", "no folder"), ("gone", "no folder")):
        with pytest.raises(TrialError, match=word):
            find_trials(job / name)


def test_settings_hold_no_secret(tmp_path: Path) -> None:
    found = read_trial(t.trial(tmp_path, "a", 0, kwargs={"temperature": 0.6, "api_key": "k", "max_tokens": 5}))
    assert found.settings == {
        "harness": "terminus-2",
        "harness_version": "2.0",
        "timeout_multiplier": 1.0,
        "agent.temperature": 0.6,
        "agent.max_tokens": 5,
    }
    assert dataset_versions(t.job(tmp_path, "j", {})) == {"small-bench": "1.0"}
