"""RSR phase 2: a planner turns a success into a reusable runbook (spec §2.1).

The planner sees the public task and the sanitised trajectory, and nothing else.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from stages.backends.protocols import GenerateRequest, Sampler, SamplingParams
from stages.chat import Chat
from stages.config import RewriteConfig
from stages.context import StageContext
from stages.domain import Phase, Runbook, RunbookLine, Task, Trajectory
from stages.leaks import load_hidden_texts
from stages.records import PhaseDone, PhaseStarted, Progress, Record, RunbookWritten
from stages.sanitise import sanitise_trajectory
from stages.seeds import derive_id, derive_seed, rng

CITE_RATIO = 0.6  # a line cites the turns whose command is at least this similar
PLAN_WAVE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Who writes: the actor itself, or another model (`RewriteConfig.planner`)."""

    name: str
    sampler: Sampler
    chat: Chat


def rewrite(
    ctx: StageContext,
    config: RewriteConfig,
    explored: Sequence[Trajectory],
    tasks: Mapping[str, Task],
    planner: Planner,
) -> Generator[Record, None, list[Runbook]]:
    """One runbook per chosen success. Replies that were cut or are empty are counted, not kept."""
    sources = _sources(ctx, config, explored)
    yield PhaseStarted(phase=Phase.REWRITE, total=len(sources))
    books: list[Runbook] = []
    tokens = 0
    for start in range(0, len(sources), PLAN_WAVE):
        written, sampled = ctx.backends.run(_plan(ctx, config, sources[start : start + PLAN_WAVE], tasks, planner))
        tokens += sampled
        for book in written:
            books.append(book)
            yield RunbookWritten(runbook=book)
        yield Progress(phase=Phase.REWRITE, done=min(start + PLAN_WAVE, len(sources)), total=len(sources))
    yield PhaseDone(phase=Phase.REWRITE, facts={"sources": len(sources), "runbooks": len(books), "tokens": tokens})
    return books


def _sources(ctx: StageContext, config: RewriteConfig, explored: Sequence[Trajectory]) -> list[Trajectory]:
    """Up to `runbooks_per_task` successes of each task whose pass rate is not too high, chosen uniformly."""
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in explored:
        by_task[trajectory.task_id].append(trajectory)
    chosen: list[Trajectory] = []
    for task_id, group in by_task.items():
        passed = [t for t in group if t.strict]
        if passed and len(passed) <= config.max_pass_rate * len(group):
            random = rng(*ctx.seed, Phase.REWRITE, task_id)
            chosen += random.sample(passed, min(config.runbooks_per_task, len(passed)))
    return chosen


async def _plan(
    ctx: StageContext, config: RewriteConfig, sources: Sequence[Trajectory], tasks: Mapping[str, Task], planner: Planner
) -> tuple[list[Runbook], int]:
    """The runbooks, and the tokens that the planner sampled, useless replies included."""
    chat, sampling = planner.chat, config.sampling
    requests = []
    for source in sources:
        task = tasks[source.task_id]
        messages = [chat.task_message(task.instruction)]
        for command, observation in sanitise_trajectory(
            source, task, hidden_texts=load_hidden_texts(task), special_tokens=chat.special_tokens
        ):
            messages.append({"role": "assistant", "content": chat.clean(command)})
            messages.append(chat.observation_message(observation))
        messages.append(chat.plan_message())
        ids = chat.encode(chat.render(messages))
        if len(ids) + sampling.max_new_tokens > planner.sampler.context_len:
            continue
        key = (*ctx.seed, Phase.REWRITE, source.task_id, source.attempt)
        requests.append(
            (
                source,
                GenerateRequest(
                    rid=derive_id(ctx.namespace, *key),
                    input_ids=ids,
                    sampling_params=SamplingParams(
                        max_new_tokens=sampling.max_new_tokens,
                        temperature=sampling.temperature,
                        top_p=sampling.top_p,
                        stop_token_ids=chat.stop_token_ids,
                        sampling_seed=derive_seed(*key),
                    ),
                ),
            )
        )
    answers = await planner.sampler.generate([r for _, r in requests]) if requests else []
    await planner.sampler.release([r.rid for _, r in requests])
    books = []
    for (source, request), answer in zip(requests, answers, strict=True):
        raw = chat.decode(chat.strip_stop(answer.output_ids))
        lines = chat.runbook_lines(raw)
        if answer.finish_reason == "stop" and lines:
            books.append(
                Runbook(
                    id=request.rid,
                    task_id=source.task_id,
                    source_trajectory_id=source.id,
                    planner=planner.name,
                    lines=tuple(RunbookLine(text=line, cites=_cites(line, source)) for line in lines),
                    raw_text=raw,
                )
            )
    return books, sum(len(answer.output_ids) for answer in answers)


def _cites(line: str, source: Trajectory) -> tuple[int, ...]:
    """Source turns that the line restates, so that a reviewer can follow it."""
    matcher = difflib.SequenceMatcher(b=line, autojunk=False)
    cites = []
    for turn in source.turns:
        matcher.set_seq1(turn.action)
        if line in turn.action or matcher.ratio() >= CITE_RATIO:
            cites.append(turn.index)
    return tuple(cites)
