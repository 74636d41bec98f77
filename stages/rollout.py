"""Attempts in sandboxes become trajectories (spec §7).

Attempts run in *waves*: all attempts of a wave are decoded together, then all their commands run, then the next turn.
Which attempts share a wave depends on their order alone, never on timing, so the same seed gives the same tokens. `lanes`
waves are in flight at once: while one is decoded, the shells of another run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from stages.backends.protocols import (
    Backends,
    CommandResult,
    GenerateRequest,
    SamplingParams,
    Sandbox,
    VerifierReport,
)
from stages.chat import Chat, Message
from stages.config import RolloutConfig, SamplingConfig
from stages.domain import EndReason, Runbook, Task, Trajectory, Turn, Verdict
from stages.errors import SandboxError
from stages.harness.shell import ShellHarness
from stages.seeds import derive_id, derive_seed
from stages.tokens import Ledger, count_drift

SPAWNS = 16  # sandboxes being started, or verified, at one moment: more only makes each of them late
OPEN_LIMIT_S = 600.0  # an image may have to be built
LIVENESS_GRACE_S = 60.0  # on top of a task's own time limits: a stuck sandbox never stalls a wave


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpec:
    """One attempt to make. `key` names it within its stage: (phase, step, task, attempt, …)."""

    task: Task
    attempt: int
    key: tuple[object, ...]
    runbook: Runbook | None = None


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt under way."""

    spec: AttemptSpec
    id: str
    seed: int
    messages: list[Message]
    ledger: Ledger
    max_turns: int
    sandbox: Sandbox | None = None
    turns: list[Turn] = field(default_factory=list)
    end: EndReason | None = None
    error: str = ""
    sampler_s: float = 0.0
    sandbox_s: float = 0.0
    started: float = field(default_factory=time.monotonic)


def run_attempts(
    specs: Sequence[AttemptSpec],
    *,
    backends: Backends,
    chat: Chat,
    config: RolloutConfig,
    sampling: SamplingConfig,
    seed: tuple[object, ...],
    namespace: str,
) -> Iterator[list[Trajectory]]:
    """Yields finished waves in order. `seed` and each spec's `key` fix every random choice of an attempt; `namespace` only
    makes its id unique.

    Raises SamplerError when the sampler is gone (nothing is lost: finished waves were yielded). A sandbox that fails makes
    its attempt an `infra_error`.
    """
    waves = [specs[i : i + config.wave_size] for i in range(0, len(specs), config.wave_size)]
    lanes = asyncio.Semaphore(config.lanes)
    runner = _WaveRunner(backends=backends, chat=chat, config=config, sampling=sampling, seed=seed, namespace=namespace)

    async def start() -> list[asyncio.Task[list[Trajectory]]]:
        async def lane(wave: Sequence[AttemptSpec]) -> list[Trajectory]:
            async with lanes:
                return await runner.run(wave)

        return [asyncio.ensure_future(lane(wave)) for wave in waves]

    tasks = backends.run(start())
    try:
        for task in tasks:
            yield backends.run(_wait(task))
    finally:  # the caller stopped early, or a wave failed: leave no attempt running
        for task in tasks:
            task.cancel()
        backends.run(_settle(tasks))


async def _wait(task: asyncio.Task[list[Trajectory]]) -> list[Trajectory]:
    return await task


async def _settle(tasks: Sequence[asyncio.Task[list[Trajectory]]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class _WaveRunner:
    def __init__(
        self,
        *,
        backends: Backends,
        chat: Chat,
        config: RolloutConfig,
        sampling: SamplingConfig,
        seed: tuple[object, ...],
        namespace: str,
    ) -> None:
        self._sampler, self._sandboxes = backends.sampler, backends.sandbox
        self._chat, self._config, self._sampling, self._seed = chat, config, sampling, seed
        self._namespace = namespace
        self._spawning = asyncio.Semaphore(SPAWNS)
        self._harness = ShellHarness(observation_chars=config.observation_chars)

    async def run(self, specs: Sequence[AttemptSpec]) -> list[Trajectory]:
        attempts = [self._begin(spec) for spec in specs]
        try:
            await asyncio.gather(*(self._open(a) for a in attempts))
            while live := [a for a in attempts if a.end is None]:
                replies = await self._sample(live)
                await asyncio.gather(
                    *(self._act(a, text) for a, text in zip(live, replies, strict=True) if text is not None)
                )
            reports = await asyncio.gather(*(self._verify(a) for a in attempts))
            return [self._trajectory(a, report) for a, report in zip(attempts, reports, strict=True)]
        finally:
            await self._sampler.release([a.id for a in attempts])
            await asyncio.gather(*(a.sandbox.close() for a in attempts if a.sandbox), return_exceptions=True)

    def _begin(self, spec: AttemptSpec) -> _Attempt:
        messages = [self._chat.task_message(spec.task.instruction, spec.runbook)]
        return _Attempt(
            spec=spec,
            id=derive_id(self._namespace, *self._seed, *spec.key),
            seed=derive_seed(*self._seed, *spec.key),
            messages=messages,
            ledger=Ledger(self._chat, self._chat.render(messages)),
            max_turns=min(spec.task.max_turns, self._config.max_turns or spec.task.max_turns),
        )

    async def _open(self, attempt: _Attempt) -> None:
        async with self._spawning:
            started = time.monotonic()
            try:
                attempt.sandbox = await asyncio.wait_for(self._sandboxes.open(attempt.spec.task), OPEN_LIMIT_S)
            except (SandboxError, TimeoutError) as error:
                attempt.end, attempt.error = EndReason.ERROR, str(error) or "the sandbox did not start"
            attempt.sandbox_s += time.monotonic() - started

    async def _sample(self, live: list[_Attempt]) -> list[str | None]:
        """One reply each; None where the attempt ended instead."""
        started = time.monotonic()
        ready = [a for a in live if self._fits(a)]
        answers = await self._sampler.generate([self._request(a) for a in ready]) if ready else []
        took = (time.monotonic() - started) / max(1, len(ready))
        replies: dict[str, str] = {}
        for attempt, answer in zip(ready, answers, strict=True):
            attempt.sampler_s += took
            start, end = attempt.ledger.add_sample(answer, len(attempt.turns))
            reply = self._chat.decode(self._chat.strip_stop(answer.output_ids))
            attempt.messages.append({"role": "assistant", "content": reply})
            segment = attempt.ledger.segment_index
            attempt.turns.append(
                Turn(
                    index=len(attempt.turns),
                    action=reply,
                    observation="",
                    exit_code=None,
                    segment=segment,
                    start=start,
                    end=end,
                )
            )
            if answer.finish_reason == "abort":
                attempt.end = EndReason.CANCELLED
            elif answer.finish_reason == "length":  # the reply was cut: what it would have been is unknown
                attempt.end = EndReason.TOKEN_CAP
            else:
                replies[attempt.id] = reply
        return [replies.get(a.id) for a in live]

    def _fits(self, attempt: _Attempt) -> bool:
        tokens, new = len(attempt.ledger.input_ids), self._sampling.max_new_tokens
        if tokens > self._config.max_context_tokens or tokens + new > self._sampler.context_len:
            attempt.end = EndReason.CONTEXT_OVERFLOW
        if time.monotonic() - attempt.started > attempt.spec.task.agent_timeout_s:
            attempt.end = EndReason.TIME_LIMIT
        cap = self._config.max_tokens_per_attempt
        if cap and sum(t.end - t.start for t in attempt.turns) >= cap:
            attempt.end = EndReason.TOKEN_CAP
        return attempt.end is None

    def _request(self, attempt: _Attempt) -> GenerateRequest:
        s = self._sampling
        return GenerateRequest(
            rid=attempt.id,
            input_ids=attempt.ledger.input_ids,
            sampling_params=SamplingParams(
                max_new_tokens=s.max_new_tokens,
                temperature=s.temperature,
                top_p=s.top_p,
                stop_token_ids=self._chat.stop_token_ids,
                sampling_seed=derive_seed(attempt.seed, len(attempt.turns)),
            ),
            return_routed_experts=bool(getattr(self._sampler, "is_moe", False)),
            routed_experts_start_len=attempt.ledger.expert_rows,
        )

    async def _act(self, attempt: _Attempt, reply: str) -> None:
        command = self._harness.command(reply)
        if command is None:
            attempt.end = EndReason.DONE
            return
        assert attempt.sandbox is not None
        limit = attempt.spec.task.limits.command_timeout_s
        started = time.monotonic()
        try:
            result = await asyncio.wait_for(attempt.sandbox.run(command, timeout_s=limit), limit + LIVENESS_GRACE_S)
        except (SandboxError, TimeoutError) as error:
            attempt.end, attempt.error = EndReason.ERROR, str(error) or "the sandbox did not answer"
            return
        attempt.sandbox_s += time.monotonic() - started
        self._observe(attempt, result)

    def _observe(self, attempt: _Attempt, result: CommandResult) -> None:
        observation = self._harness.observe(result)
        attempt.turns[-1] = replace(
            attempt.turns[-1],
            observation=observation,
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            duration_s=result.duration_s,
        )
        if len(attempt.turns) >= attempt.max_turns:
            attempt.end = EndReason.TURN_CAP
            return
        attempt.messages.append(self._chat.observation_message(observation))
        attempt.ledger.extend(self._chat.render(attempt.messages))

    async def _verify(self, attempt: _Attempt) -> VerifierReport:
        """A final state is verified whatever ended the attempt; errors and cancelled attempts have no verdict."""
        if attempt.end is EndReason.CANCELLED or (attempt.sandbox is None and not attempt.error):
            return VerifierReport(verdict=Verdict.NONE)
        if attempt.end is EndReason.ERROR or attempt.sandbox is None:
            return VerifierReport(verdict=Verdict.INFRA_ERROR, log=attempt.error)
        limit = attempt.spec.task.verifier_timeout_s + LIVENESS_GRACE_S
        async with self._spawning:
            started = time.monotonic()
            try:
                report = await asyncio.wait_for(attempt.sandbox.verify(), limit)
            except (SandboxError, TimeoutError) as error:
                return VerifierReport(verdict=Verdict.INFRA_ERROR, log=str(error) or "the verifier did not answer")
            attempt.sandbox_s += time.monotonic() - started
            await attempt.sandbox.close()
        return report

    def _trajectory(self, attempt: _Attempt, report: VerifierReport) -> Trajectory:
        task = attempt.spec.task
        trajectory = Trajectory(
            id=attempt.id,
            task_id=task.id,
            suite=task.suite,
            family=task.family,
            stratum=task.stratum,
            attempt=attempt.spec.attempt,
            seed=attempt.seed,
            turns=tuple(attempt.turns),
            segments=attempt.ledger.segments(),
            checks=report.checks,
            end_reason=attempt.end or EndReason.ERROR,
            verdict=report.verdict,
            weight_version=self._sampler.weight_version,
            runbook_id=attempt.spec.runbook.id if attempt.spec.runbook else None,
            boundaries=dict(attempt.ledger.boundaries),
            flags=report.flags,
            duration_s=time.monotonic() - attempt.started,
            sampler_s=attempt.sampler_s,
            sandbox_s=attempt.sandbox_s,
            nop_progress=task.nop_progress,
            raw_answers=attempt.ledger.raw_answers(),
            verifier_log="" if report.verdict.counts else report.log[-4000:],
        )
        return replace(trajectory, drift_tokens=count_drift(trajectory))
