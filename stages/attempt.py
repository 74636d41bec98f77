"""One attempt under way: its conversation and ledger, and what it asks the sampler for next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stages.backends.protocols import GenerateAnswer, Sandbox, VerifierReport
from stages.chat import Chat, Message
from stages.config import RolloutConfig
from stages.domain import EndReason, Runbook, Task, Trajectory, Turn
from stages.harness.protocol import Observed, Session
from stages.harness.terminus2.compaction import Compaction
from stages.seeds import derive_seed
from stages.tokens import Ledger, count_drift


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpec:
    """One attempt to make. `key` names it within its stage: (phase, step, task, attempt, …)."""

    task: Task
    attempt: int
    key: tuple[object, ...]
    runbook: Runbook | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """Between two turns it asks for exactly one thing: the next turn, or the next sub-call of a summarisation."""

    spec: AttemptSpec
    id: str
    seed: int
    chat: Chat
    config: RolloutConfig
    context_len: int  # of the sampler
    ledger: Ledger
    messages: list[Message] = field(default_factory=list)
    sandbox: Sandbox | None = None
    session: Session | None = None
    turns: list[Turn] = field(default_factory=list)
    compaction: Compaction | None = None  # the summarisation under way
    subcalls: int = 0
    end: EndReason | None = None
    error: str = ""
    sampler_s: float = 0.0
    sandbox_s: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Wall clock that the task leaves its agent."""
        return self.spec.task.agent_timeout_s - (time.monotonic() - self.started)

    @property
    def max_turns(self) -> int:
        limit = self.spec.task.max_turns
        return min(limit, self.config.max_turns or limit)

    def begin(self, opening: Message) -> None:
        """The first message is known."""
        self.messages = [opening]
        self.ledger.start_segment(self.chat.render(self.messages))

    # ------------------------------------------------------------------ asking

    def needs_compaction(self, new_tokens: int) -> bool:
        """Proactive at the threshold, and the last resort when the next turn would not fit (spec §7)."""
        at = self.config.compaction_at(self.context_len)
        if at is None or self.compaction is not None or not self.ledger.has_sample:
            return False
        tokens = len(self.ledger.input_ids)
        return tokens >= at or not self._has_room(tokens, new_tokens)

    def start_compaction(self, compaction: Compaction) -> None:
        self.compaction = compaction
        self.ledger.close_segment()

    def next_ids(self, new_tokens: int) -> Sequence[int] | None:
        """The next request's prompt; None: it would not fit, and `end` says so."""
        ids: Sequence[int] = self.ledger.input_ids
        if self.compaction is not None:
            ids = self._encoded(self.compaction)
            while not self._has_room(len(ids), new_tokens) and self.compaction.shrink():
                ids = self._encoded(self.compaction)
        if self._has_room(len(ids), new_tokens):
            return ids
        self.end = EndReason.CONTEXT_OVERFLOW
        return None

    @property
    def sampling_seed(self) -> int:
        if self.compaction is not None:
            return derive_seed(self.seed, "subcall", self.subcalls)
        return derive_seed(self.seed, len(self.turns))

    @property
    def expert_rows(self) -> int:
        return self.ledger.expert_rows if self.compaction is None else 0

    def _encoded(self, compaction: Compaction) -> list[int]:
        return self.chat.encode(self.chat.render(compaction.prompt()))

    def _has_room(self, tokens: int, new_tokens: int) -> bool:
        return tokens <= self.config.max_context_tokens and tokens + new_tokens <= self.context_len

    # ------------------------------------------------------------------ answers

    def add_turn(self, answer: GenerateAnswer) -> str:
        """The sampled reply becomes a turn; its observation follows with `observe`."""
        start, end = self.ledger.add_sample(answer, len(self.turns))
        reply = self._text(answer)
        self.messages.append({"role": "assistant", "content": reply})
        self._note(reply, self.ledger.segment_index, start, end)
        return reply

    def add_subcall(self, prompt: Sequence[int], answer: GenerateAnswer) -> None:
        """One reply of the summarisation; after the last a new segment starts."""
        assert self.compaction is not None
        reply, kind, segment = self._text(answer), self.compaction.kind, self.ledger.segment_index
        turn = len(self.turns) if self.config.train_summaries else None
        start, end = self.ledger.add_subcall(kind, prompt, answer, turn)
        self.subcalls += 1
        if turn is not None:
            self._note(reply, segment, start, end)
        self.compaction.answer(reply)
        if self.compaction.done:
            self.messages = self.compaction.messages()
            self.ledger.start_segment(self.chat.render(self.messages))
            self.compaction = None

    def observe(self, seen: Observed) -> None:
        """What followed the last turn. Ends the attempt or makes the next prompt."""
        self.turns[-1] = replace(
            self.turns[-1],
            observation=seen.observation,
            exit_code=seen.exit_code,
            timed_out=seen.timed_out,
            duration_s=seen.duration_s,
        )
        self.end = seen.end
        if self.end is None and len(self.turns) >= self.max_turns:
            self.end = EndReason.TURN_CAP
        if self.end is None:
            self.messages.append(self.chat.observation_message(seen.observation))
            self.ledger.extend(self.chat.render(self.messages))

    def _text(self, answer: GenerateAnswer) -> str:
        return self.chat.decode(self.chat.strip_stop(answer.output_ids))

    def _note(self, reply: str, segment: int, start: int, end: int) -> None:
        self.turns.append(
            Turn(
                index=len(self.turns),
                action=reply,
                observation="",
                exit_code=None,
                segment=segment,
                start=start,
                end=end,
            )
        )

    # ------------------------------------------------------------------ after

    def trajectory(self, report: VerifierReport, weight_version: str) -> Trajectory:
        task = self.spec.task
        trajectory = Trajectory(
            id=self.id,
            task_id=task.id,
            suite=task.suite,
            family=task.family,
            stratum=task.stratum,
            attempt=self.spec.attempt,
            seed=self.seed,
            turns=tuple(self.turns),
            segments=self.ledger.segments(),
            checks=report.checks,
            end_reason=self.end or EndReason.ERROR,
            verdict=report.verdict,
            weight_version=weight_version,
            runbook_id=self.spec.runbook.id if self.spec.runbook else None,
            boundaries=dict(self.ledger.boundaries),
            flags=report.flags,
            duration_s=time.monotonic() - self.started,
            sampler_s=self.sampler_s,
            sandbox_s=self.sandbox_s,
            nop_progress=task.nop_progress,
            raw_answers=self.ledger.raw_answers(),
            verifier_log="" if report.verdict.counts else report.log[-4000:],
        )
        return replace(trajectory, drift_tokens=count_drift(trajectory))
