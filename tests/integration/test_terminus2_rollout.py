"""Terminus-2 in real sandboxes with tmux: rollouts through the ledger, compaction, a small explore → replay, a URL."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from stages.backends.protocols import Backends, Learner
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.batch import score
from stages.chat import Chat
from stages.config import (
    DistilConfig,
    ExploreConfig,
    ReplayConfig,
    RewriteConfig,
    RolloutConfig,
    RPRConfig,
    SamplingConfig,
)
from stages.context import StageContext
from stages.distil import _sequences
from stages.domain import EndReason, Runbook, Task, Trajectory, Verdict
from stages.explore import explore
from stages.harness.terminus2.prompt import FIRST
from stages.records import AttemptFinished
from stages.replay import replay
from stages.rewards import RewardKind, RewardModel
from stages.rewrite import Planner, rewrite
from stages.rollout import AttemptSpec, run_attempts
from stages.tokens import require_no_drift
from tests.integration.sandbox_kit import make_task
from tests.scripted import ScriptedSampler, byte_chat, keys

pytestmark = pytest.mark.skipif(shutil.which("tmux", path="/usr/bin:/bin") is None, reason="no tmux on this machine")
SOLVE = keys("echo 42 > answer.txt\n", "mkdir -p out; ls input > out/list.txt\n")
Script = Callable[[str, str], str | tuple[str, str]]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return byte_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def sandboxes() -> BubblewrapBackend:
    return BubblewrapBackend()


@pytest.fixture
def backends(chat: Chat, sandboxes: BubblewrapBackend) -> Iterator[Callable[[Script], Backends]]:
    opened: list[Backends] = []

    def make(script: Script) -> Backends:
        learner = cast("Learner", SimpleNamespace(close=lambda: None))  # nothing is trained here
        made = Backends(sampler=ScriptedSampler(chat, script), learner=learner, sandbox=sandboxes)
        opened.append(made.__enter__())
        return made

    yield make
    for one in opened:
        one.__exit__(None, None, None)


def attempt(chat: Chat, backends: Backends, tasks: list[Task], **config: object) -> list[Trajectory]:
    waves = run_attempts(
        [AttemptSpec(task=task, attempt=0, key=(n,)) for n, task in enumerate(tasks)],
        backends=backends,
        chat=chat,
        config=RolloutConfig.model_validate({"harness": "terminus2", **config}),
        sampling=SamplingConfig(max_new_tokens=4000),
        seed=(1,),
        namespace="test",
    )
    return [t for wave in waves for t in wave]


def timed(task: Task, seconds: float = 30.0) -> Task:
    return replace(task, instruction="Write 42 to answer.txt and list input/.", agent_timeout_s=seconds)


def test_one_attempt_with_errors_confirmation_and_compaction(chat: Chat, backends, tmp_path: Path) -> None:
    """Prose, a broken reply, a truncated one, two sub-call rounds of a summary; confirmed twice; verified; no drift."""

    def script(last: str, prompt: str) -> str:
        if "hand your work over" in last:
            return "SUMMARY: data.txt was read"
        if "Begin by asking" in last:
            return "QUESTIONS: what is in input?"
        if "has a few questions" in last:
            return "ANSWERS: one file"
        if "Are you sure" in last:
            return keys(done=True)
        if "answers the other agent provided" in last:
            assert "SUMMARY: data.txt was read" in prompt
            assert "long long" not in prompt  # the old conversation is gone
            return "Now:\n" + SOLVE[: -len('], "task_complete": false}')]
        if "parsing errors" in last:
            assert "Missing required fields: plan" in last
            return keys(": read me\n").replace('"p"', '"' + "long " * 500 + '"')
        if "had warnings" in last:
            assert "AUTO-CORRECTED" in last
            return keys(done=True)
        if "Task Description" in last:
            return keys("cat input/data.txt\n")
        assert "data" in last.splitlines()
        return '{"analysis": "no plan", "commands": []}'

    made = backends(script)
    (whole,) = attempt(chat, made, [timed(make_task(tmp_path))], compaction=f"accumulated={len(FIRST) + 2500}")
    assert (whole.verdict, whole.end_reason, whole.drift_tokens) == (Verdict.PASSED, EndReason.DONE, 0)
    require_no_drift([whole])
    assert [s.kind for s in whole.segments] == ["policy", "summary", "questions", "answers", "policy"]
    assert [t.segment for t in whole.turns] == [0, 0, 0, 4, 4, 4]
    for turn in whole.turns:
        segment = whole.segments[turn.segment]
        assert chat.decode(chat.strip_stop(segment.tokens[turn.start : turn.end].tolist())) == turn.action
        assert segment.loss_mask[turn.start : turn.end].all()
        assert (segment.turn_ids[turn.start : turn.end] == turn.index).all()
    assert [int(s.loss_mask.sum()) > 0 for s in whole.segments] == [True, False, False, False, True]
    assert set(whole.boundaries) == {"strict_prefix"}  # the summary is no repair
    trained_on(whole)
    sampler = cast("ScriptedSampler", made.sampler)
    assert sampler.waves == [1] * 9  # six turns, three sub-calls, each in its place
    assert len({r.sampling_params.sampling_seed for r in sampler.requests}) == 9


def test_trained_summaries_and_the_ways_an_attempt_ends(chat: Chat, backends, tmp_path: Path) -> None:
    """One wave: an exit, a cut reply, a time limit inside a wait, a turn cap, and a summary that is trained on."""

    def script(last: str, prompt: str) -> str | tuple[str, str]:
        role = prompt.partition("role=")[2].partition(".")[0]
        if role == "exit":
            return keys("exit\n", wait=0.4)
        if role == "cut":
            return keys(done=True) if "Are you sure" in last or "exceeded" in last else ("half a re", "length")
        if role == "slow":
            return keys("sleep 50\n", wait=50)
        if "hand your work over" in last or "Begin by asking" in last or "has a few questions" in last:
            return "words"
        return keys("true\n").replace('"p"', '"' + "plan " * 400 + '"')

    seconds = {"exit": 30.0, "cut": 30.0, "slow": 2.0, "capped": 30.0}
    tasks = [replace(timed(make_task(tmp_path), s), instruction=f"role={r}.", max_turns=5) for r, s in seconds.items()]
    exits, cut, slow, capped = attempt(
        chat, backends(script), tasks, compaction=f"accumulated={len(FIRST) + 1500}", train_summaries=True
    )
    assert (exits.end_reason, exits.verdict) == (EndReason.DONE, Verdict.FAILED)
    assert (cut.end_reason, len(cut.turns)) == (EndReason.DONE, 3)
    assert "NONE of the actions" in cut.turns[0].observation
    assert slow.end_reason is EndReason.TIME_LIMIT
    assert slow.verdict is Verdict.FAILED
    assert slow.duration_s < 20
    assert capped.end_reason is EndReason.TURN_CAP
    kinds = [s.kind for s in capped.segments]
    assert kinds[:4] == ["policy", "summary", "questions", "answers"]
    for segment, kind in zip(capped.segments, kinds, strict=True):
        assert segment.loss_mask.any(), kind
        if kind != "policy":  # each is one turn
            assert len(np.unique(segment.turn_ids[segment.loss_mask])) == 1
    require_no_drift([exits, cut, slow, capped])


def test_explore_rewrite_and_replay_in_different_harnesses(chat: Chat, backends, tmp_path: Path) -> None:
    """Explored by single commands, replayed with keystrokes; the runbook is in the prompt, and distillation cuts it out."""

    def script(last: str, prompt: str) -> str:
        if "reusable runbook" in last:
            return "echo 42 > answer.txt\nmkdir out\nls input > out/list.txt"
        if "JSON object" in prompt:
            assert "Follow this runbook" in prompt
            return keys(done=True) if "Are you sure" in last or "New Terminal" in last else SOLVE
        return "done" if "echo 42" in prompt else "echo 42 > answer.txt; mkdir out; ls input > out/list.txt"

    tasks = [timed(make_task(tmp_path)) for _ in range(2)]
    made = backends(script)
    ctx = StageContext(
        backends=made,
        chat=chat,
        rollout=RolloutConfig(harness="shell", observation_chars=64),
        seed=(1, "RSR-1"),
        namespace="test",
        max_new_tokens=4000,
        work_dir=tmp_path,
    )
    sampling = SamplingConfig(max_new_tokens=4000)
    explored = drain(explore(ctx, ExploreConfig(attempts_per_task=2, sampling=sampling), tasks))
    assert [t.verdict for t in explored] == [Verdict.PASSED] * 4
    assert all("JSON" not in t.turns[0].action for t in explored)
    planner = Planner(name="actor", sampler=made.sampler, chat=chat)
    by_id = {t.id: t for t in tasks}
    books: list[Runbook] = drain(rewrite(ctx, RewriteConfig(sampling=sampling), explored, by_id, planner))
    assert len(books) == 2
    config = ReplayConfig(attempts_per_runbook=1, harness="terminus2", sampling=sampling)
    demos = drain(replay(ctx, config, books, by_id))
    assert len(demos) == 2
    for demo in demos:
        (policy,) = demo.trajectory.segments
        assert "Follow this runbook" in chat.decode(policy.tokens.tolist())
    made_of = _sequences(chat, DistilConfig(), demos, by_id, "terminus2")
    for demo in demos:
        ((sequence,),) = made_of[demo.trajectory.task_id]
        assert "runbook" not in chat.decode(sequence.tokens.tolist())
        (policy,) = demo.trajectory.segments
        assert sequence.tokens[sequence.loss_mask].tolist() == policy.tokens[policy.loss_mask].tolist()
        assert (sequence.rollout_log_probs[sequence.loss_mask] == -0.25).all()


def trained_on(whole: Trajectory) -> None:
    """A step trains on the two policy segments, values and advantages handed over between them; on no sub-call."""

    class Critic:
        def values(self, batch):
            return [np.where(s.loss_mask, 0.5, 0.0).astype(np.float32) for s in batch]

    config = RPRConfig(global_batch_size=1, over_sampling_batch_size=1)
    reward = RewardModel(kind=RewardKind.BINARY)
    batch = score(cast("Learner", Critic()), config, [whole], reward)
    policy = [s for s in whole.segments if s.kind == "policy"]
    assert [s.tokens.tolist() for s in batch.sequences] == [s.tokens.tolist() for s in policy]
    assert all((s.advantages[s.loss_mask] == 0.5).all() for s in batch.sequences)  # γ = λ = 1: reward 1 − v
    assert batch.metrics["handover/boundaries"] == 1.0
    assert batch.metrics["handover/value_gap_mean"] == 0.0


def drain(stage):
    """A stage's return value; every attempt that it yields is whole."""
    try:
        while True:
            record = next(stage)
            if isinstance(record, AttemptFinished):
                assert record.trajectory.drift_tokens == 0
    except StopIteration as end:
        return end.value
