"""Attempts in sandboxes become trajectories (spec §7).

Attempts run in *waves*: all attempts of a wave are decoded together, then all their commands run, then the next turn.
Which attempts share a wave depends on their order alone, never on timing, so the same seed gives the same tokens. `lanes`
waves are in flight at once: while one is decoded, the shells of another run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

from stages.attempt import Attempt, AttemptSpec
from stages.backends.protocols import Backends, GenerateRequest, SamplingParams, VerifierReport
from stages.chat import Chat
from stages.config import RolloutConfig, SamplingConfig
from stages.domain import EndReason, Trajectory, Verdict
from stages.errors import SandboxError
from stages.harness.protocol import LIVENESS_GRACE_S, LiveSandbox
from stages.harness.registry import harness_of
from stages.oversampling import Race
from stages.seeds import derive_id, derive_seed
from stages.tokens import Ledger

__all__ = ["AttemptSpec", "run_attempts"]

SPAWNS = 16  # sandboxes being started, or verified, at one moment: more only makes each of them late
OPEN_LIMIT_S = 600.0  # an image may have to be built
VERIFIER_ROUNDS = 12  # time limits of a verifier: its own, those that it waits for, and the ones on a pristine image


def run_attempts(
    specs: Sequence[AttemptSpec],
    *,
    backends: Backends,
    chat: Chat,
    config: RolloutConfig,
    sampling: SamplingConfig,
    seed: tuple[object, ...],
    namespace: str,
    race: Race | None = None,
) -> Iterator[list[Trajectory]]:
    """Yields finished waves in order. `seed` and each spec's `key` fix every random choice of an attempt; `namespace` only
    makes its id unique. `race`: waves whose attempts are all lost in it are cancelled.

    Raises SamplerError when the sampler is gone (nothing is lost: finished waves were yielded). A sandbox that fails makes
    its attempt an `infra_error`.
    """
    waves = [specs[i : i + config.wave_size] for i in range(0, len(specs), config.wave_size)]
    lanes = asyncio.Semaphore(config.lanes)
    runner = _WaveRunner(
        backends=backends, chat=chat, config=config, sampling=sampling, seed=seed, namespace=namespace, race=race
    )

    async def start() -> list[asyncio.Task[list[Trajectory]]]:
        async def lane(wave: Sequence[AttemptSpec], first: int) -> list[Trajectory]:
            async with lanes:
                return await runner.run(wave, first)

        return [asyncio.ensure_future(lane(wave, n * config.wave_size)) for n, wave in enumerate(waves)]

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
        race: Race | None,
    ) -> None:
        self._race = race
        self._sampler, self._sandboxes = backends.sampler, backends.sandbox
        self._chat, self._config, self._sampling, self._seed = chat, config, sampling, seed
        self._namespace = namespace
        self._spawning = asyncio.Semaphore(SPAWNS)
        self._harness = harness_of(config)

    async def run(self, specs: Sequence[AttemptSpec], first: int) -> list[Trajectory]:
        """One wave; `first` is its first attempt's place among all of them."""
        attempts = [self._begin(spec) for spec in specs]
        reports: dict[int, asyncio.Task[VerifierReport]] = {}
        try:
            await asyncio.gather(*(self._open(a) for a in attempts))
            while live := [(i, a) for i, a in enumerate(attempts, first) if a.end is None]:
                if self._race is not None:
                    self._judge(attempts, first, reports)
                    if await self._lost(self._race, live, reports.values()):
                        for _, attempt in live:
                            attempt.end = EndReason.CANCELLED
                        break
                await asyncio.gather(*(self._compact(a) for _, a in live))
                replies = await self._sample([a for _, a in live])
                await asyncio.gather(*(self._act(a, reply, cut) for a, reply, cut in replies))
            self._judge(attempts, first, reports)
            found = await asyncio.gather(*(reports[i] for i, _ in enumerate(attempts, first)))
            version = self._sampler.weight_version
            return [a.trajectory(report, version) for a, report in zip(attempts, found, strict=True)]
        finally:
            for task in reports.values():
                task.cancel()
            await self._sampler.release([a.id for a in attempts])
            await asyncio.gather(*(a.sandbox.close() for a in attempts if a.sandbox), return_exceptions=True)

    def _begin(self, spec: AttemptSpec) -> Attempt:
        return Attempt(
            spec=spec,
            id=derive_id(self._namespace, *self._seed, *spec.key),
            seed=derive_seed(*self._seed, *spec.key),
            chat=self._chat,
            config=self._config,
            context_len=self._sampler.context_len,
            ledger=Ledger(self._chat),
        )

    async def _open(self, attempt: Attempt) -> None:
        task = attempt.spec.task
        async with self._spawning:
            started = time.monotonic()
            try:
                attempt.sandbox = await asyncio.wait_for(self._sandboxes.open(task), OPEN_LIMIT_S)
                attempt.session = self._harness.session(LiveSandbox(attempt.sandbox, task), task)
                attempt.begin(await attempt.session.opening(self._chat, attempt.spec.runbook))
            except (SandboxError, TimeoutError) as error:
                attempt.end, attempt.error = EndReason.ERROR, str(error) or "the sandbox did not start"
            attempt.sandbox_s += time.monotonic() - started

    async def _compact(self, attempt: Attempt) -> None:
        """Start a summarisation where one is due; its sub-calls take the place of turns in this wave."""
        assert attempt.session is not None
        if not attempt.needs_compaction(self._sampling.max_new_tokens):
            return
        try:
            compaction = await attempt.session.compaction(attempt.messages)
        except SandboxError as error:
            attempt.end, attempt.error = EndReason.ERROR, str(error)
            return
        if compaction is not None:
            attempt.start_compaction(compaction)

    async def _sample(self, live: list[Attempt]) -> list[tuple[Attempt, str, bool]]:
        """Attempts with a reply to act on, and whether the token limit cut it."""
        started = time.monotonic()
        asked = [(a, self._request(a, ids)) for a in live if (ids := self._prompt(a)) is not None]
        answers = await self._sampler.generate([request for _, request in asked]) if asked else []
        took = (time.monotonic() - started) / max(1, len(asked))
        replies = []
        for (attempt, request), answer in zip(asked, answers, strict=True):
            attempt.sampler_s += took
            if attempt.compaction is not None:
                attempt.add_subcall(request.input_ids, answer)
            else:
                reply = attempt.add_turn(answer)
                if answer.finish_reason != "abort":
                    replies.append((attempt, reply, answer.finish_reason == "length"))
            if answer.finish_reason == "abort":
                attempt.end = EndReason.CANCELLED
        return replies

    def _prompt(self, attempt: Attempt) -> Sequence[int] | None:
        """What to sample from; None where the attempt ended instead."""
        if attempt.end is not None:
            return None
        ids = attempt.next_ids(self._sampling.max_new_tokens)
        if attempt.left_s < 0:
            attempt.end = EndReason.TIME_LIMIT
        cap = self._config.max_tokens_per_attempt
        if cap and sum(t.end - t.start for t in attempt.turns) >= cap:
            attempt.end = EndReason.TOKEN_CAP
        return ids if attempt.end is None else None

    def _request(self, attempt: Attempt, ids: Sequence[int]) -> GenerateRequest:
        s = self._sampling
        return GenerateRequest(
            rid=attempt.id,
            input_ids=ids,
            sampling_params=SamplingParams(
                max_new_tokens=s.max_new_tokens,
                temperature=s.temperature,
                top_p=s.top_p,
                stop_token_ids=self._chat.stop_token_ids,
                sampling_seed=attempt.sampling_seed,
            ),
            return_routed_experts=bool(getattr(self._sampler, "is_moe", False)),
            routed_experts_start_len=attempt.expert_rows,
        )

    async def _act(self, attempt: Attempt, reply: str, cut: bool) -> None:
        assert attempt.session is not None
        started = time.monotonic()
        try:
            seen = await attempt.session.act(reply, cut=cut, left_s=attempt.left_s)
        except SandboxError as error:
            attempt.end, attempt.error = EndReason.ERROR, str(error)
            return
        attempt.sandbox_s += time.monotonic() - started
        attempt.observe(seen)

    def _judge(self, attempts: Sequence[Attempt], first: int, reports: dict[int, asyncio.Task[VerifierReport]]) -> None:
        """Start the verification of every attempt that has ended since."""
        for i, attempt in enumerate(attempts, first):
            if attempt.end is not None and i not in reports:
                reports[i] = asyncio.ensure_future(self._report(attempt, i))
                if self._race is not None:
                    self._race.ended(len(attempt.turns), i)

    async def _report(self, attempt: Attempt, index: int) -> VerifierReport:
        report = await self._verify(attempt)
        if self._race is not None and report.verdict.counts:
            self._race.finished(len(attempt.turns), index)
        return report

    @staticmethod
    async def _lost(
        race: Race, live: Sequence[tuple[int, Attempt]], reports: Iterable[asyncio.Task[VerifierReport]]
    ) -> bool:
        """Whether no attempt that still runs can be kept. Waits for this wave's verdicts only where they may decide it."""
        if not all(race.may_be_lost(len(a.turns), i) for i, a in live):
            return False
        await asyncio.gather(*reports)
        return all(race.lost(len(a.turns), i) for i, a in live)

    async def _verify(self, attempt: Attempt) -> VerifierReport:
        """A final state is verified whatever ended the attempt; errors and cancelled attempts have no verdict."""
        if attempt.end is EndReason.CANCELLED or (attempt.sandbox is None and not attempt.error):
            return VerifierReport(verdict=Verdict.NONE)
        if attempt.end is EndReason.ERROR or attempt.sandbox is None:
            return VerifierReport(verdict=Verdict.INFRA_ERROR, log=attempt.error)
        task = attempt.spec.task
        # a verifier that an agent made hang ends by its own limit, and a pristine image is asked whose fault it was, after its
        # solution: that must not be cut short, or it would be masked
        asking = 2 * (OPEN_LIMIT_S + task.agent_timeout_s)
        limit = VERIFIER_ROUNDS * task.verifier_timeout_s + asking + LIVENESS_GRACE_S
        async with self._spawning:
            started = time.monotonic()
            try:
                report = await asyncio.wait_for(attempt.sandbox.verify(), limit)
            except (SandboxError, TimeoutError) as error:
                return VerifierReport(verdict=Verdict.INFRA_ERROR, log=str(error) or "the verifier did not answer")
            attempt.sandbox_s += time.monotonic() - started
            with contextlib.suppress(SandboxError):  # there is a verdict; what stays, the backend removes at its end
                await attempt.sandbox.close()
        return report
