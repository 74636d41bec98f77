"""Harbor job folders become an imported checkpoint, an evaluation with verdicts per task, and trajectories with checks.

Importing the same folders again changes nothing; importing more trials of a checkpoint adds to its evaluation.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from orchestrator import models as m
from orchestrator.store import Store, TrajectoryFilter
from orchestrator.store.analysis_queries import AnalysisQueries
from stages.domain import Phase, Stratum, Task, Trajectory, Verdict
from stages.errors import ConfigError, TrialError
from stages.records import EvaluationDone, TaskScore
from stages.tasks.digests import suite_digest
from stages.trials.files import printable
from stages.trials.harbor import Trial, dataset_versions, find_trials, read_trial, trajectory_of
from stages.trials.transcript import Transcript, read_transcript

CHUNK = 250  # attempts per transaction
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d__\d\d-\d\d-\d\d.*")  # how Harbor names a job by itself
NO_DATASET = "harbor-tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedEvaluation:
    """One checkpoint on one suite, both conventions (spec §8)."""

    evaluation_id: int
    checkpoint_id: int
    checkpoint: str
    suite: str
    tasks: int
    passed: int
    verdicts: int
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    evaluations: tuple[ImportedEvaluation, ...]
    trials: int  # stored
    with_checks: int
    with_turns: int
    skipped: tuple[str, ...]  # trials that did not land; each names its file
    notes: tuple[str, ...]  # landed, but something of it could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Trials that are one evaluation: one checkpoint, one suite, one way of running."""

    checkpoint: str
    suite: str
    version: str
    trials: tuple[Trial, ...]


def import_harbor(
    store: Store,
    folders: Sequence[Path],
    *,
    checkpoint: str | None = None,
    suite: str | None = None,
    watch: Callable[[str], None] = lambda text: None,
) -> ImportReport:
    """Import every trial below `folders`; a damaged one is reported and skipped, the rest lands.

    `checkpoint`: its name; default: the job folder's, or the model's where Harbor named the job by its time. `suite`:
    default: the dataset's name and version. Raises TrialError when nothing can be imported, ConfigError when trials of
    different agents, models or settings would become one checkpoint.
    """
    skipped: list[str] = []
    notes: list[str] = []
    trials = _read(folders, skipped)
    watch(f"{len(trials)} trials found, {len(skipped)} cannot be imported")
    if not trials:
        places = ", ".join(map(str, folders))
        why = "; ".join(skipped[:5]) or f"no folder below {places} holds a trial's result.json, as Harbor writes it"
        raise TrialError(f"no trial can be imported: {printable(why)}")
    groups = _groups(trials, checkpoint, suite, skipped)
    for group in groups:
        _same_way(store, group)
    landed = with_checks = with_turns = 0
    evaluations = []
    for group in groups:
        row = store.checkpoints.named(None, group.checkpoint) or store.checkpoints.save(_checkpoint(group))
        assert row.id is not None
        version = _suite(store, group)
        for chunk in _chunks(_attempts(group, version, skipped, notes)):
            _store(store, chunk, row.id)
            landed += len(chunk)
            with_checks += sum(bool(t.checks) for t, _ in chunk)
            with_turns += sum(bool(t.turns) for t, _ in chunk)
            watch(f"{group.checkpoint}: {landed} of {len(trials)} trials stored")
        if (found := _evaluate(store, group, version, row.id)) is not None:
            evaluations.append(found)
    return ImportReport(
        evaluations=tuple(evaluations),
        trials=landed,
        with_checks=with_checks,
        with_turns=with_turns,
        skipped=tuple(printable(line) for line in skipped),
        notes=tuple(printable(line) for line in notes),
    )


# ------------------------------------------------------------------------------------------------ reading


def _read(folders: Sequence[Path], skipped: list[str]) -> list[Trial]:
    """Each trial once, in order of path."""
    paths: dict[Path, None] = {}
    for folder in folders:
        found = find_trials(folder)
        paths.update(dict.fromkeys(p.resolve() for p in found.trials))
        skipped += [str(p) for p in found.problems]
    trials: dict[str, Trial] = {}
    for path in paths:
        try:
            trial = read_trial(path)
        except TrialError as error:
            skipped.append(str(error))
            continue
        if (first := trials.get(trial.id)) is not None:
            same = "is the same trial as" if first.verdict is trial.verdict else "has the id, but not the result, of"
            skipped.append(f"{path} {same} {first.folder}; it is counted once")
            continue
        trials[trial.id] = trial
    return list(trials.values())


def _groups(
    trials: Sequence[Trial], checkpoint: str | None, suite: str | None, skipped: list[str]
) -> tuple[_Group, ...]:
    ways: dict[Path, dict[tuple[object, ...], list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for trial in trials:
        ways[trial.job][_way(trial)].append(trial)
    named: dict[str, list[Trial]] = defaultdict(list)
    for job, by_way in ways.items():
        for own in by_way.values():
            named[checkpoint or _name(job, own[0], [w[0] for w in by_way.values()])] += own
    out = []
    versions = {job: dataset_versions(job) for job in ways}
    for name, own in named.items():
        if len({_way(t) for t in own}) > 1:
            said = "; ".join(sorted({_told(t) for t in own}))
            raise ConfigError(f"checkpoint {name!r} would mix trials that ran differently ({said}); import them apart")
        by_suite: dict[str, list[Trial]] = defaultdict(list)
        named_versions: dict[str, set[str]] = defaultdict(set)
        for trial in own:
            version = printable(versions[trial.job].get(trial.source, ""))
            full = f"{trial.source}@{version}" if version else trial.source or NO_DATASET
            by_suite[suite or full].append(trial)
            named_versions[suite or full].add(version)
        for suite_name, members in by_suite.items():
            version = named_versions[suite_name].pop() if len(named_versions[suite_name]) == 1 else ""
            kept = _one_version(members, skipped)
            out.append(_Group(checkpoint=name, suite=suite_name, version=version, trials=kept))
    return tuple(out)


def _way(trial: Trial) -> tuple[object, ...]:
    return (trial.agent, trial.agent_version, trial.model, tuple(sorted(trial.settings.items(), key=str)))


def _told(trial: Trial) -> str:
    settings = ", ".join(f"{k}={v}" for k, v in sorted(trial.settings.items()))
    return f"{trial.model} in {trial.agent} {trial.agent_version} with {settings}"


def _name(job: Path, trial: Trial, ways: Sequence[Trial]) -> str:
    """The job's name; the model's and agent's where the job has several, or only a time as its name."""
    timed = TIMESTAMP.fullmatch(job.name) is not None
    if len(ways) == 1:
        return trial.model if timed else printable(job.name)
    parts = [] if timed else [printable(job.name)]
    parts += [trial.model] if timed or len({t.model for t in ways}) > 1 else []
    parts += [trial.agent] if len({t.agent for t in ways}) > 1 else []
    parts += [trial.agent_version] if len({t.agent_version for t in ways}) > 1 else []
    differing = [k for k in sorted({k for t in ways for k in t.settings}) if len({t.settings.get(k) for t in ways}) > 1]
    own = [f"{k}={trial.settings.get(k)}" for k in differing if not k.startswith("harness")]
    return " ".join(parts + own)


def _one_version(trials: Sequence[Trial], skipped: list[str]) -> tuple[Trial, ...]:
    """A task whose trials ran on several versions of it keeps those of the most frequent one: they cannot be averaged."""
    digests: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for t in trials:
        digests[t.task][t.task_digest] += 1
    kept = {task: max(sorted(seen), key=lambda d: seen[d]) for task, seen in digests.items()}
    for t in trials:
        if t.task_digest != kept[t.task]:
            skipped.append(f"{t.folder / 'result.json'}: task {t.task} has another checksum than in most trials")
    mine = [t for t in trials if t.task_digest == kept[t.task]]
    return tuple(sorted(mine, key=lambda t: (t.task, t.started, t.name)))


# ------------------------------------------------------------------------------------------------ storing


def _same_way(store: Store, group: _Group) -> None:
    """Raises ConfigError when a stored evaluation of this name was measured in another way."""
    row = store.checkpoints.named(None, group.checkpoint)
    if row is None or row.id is None:
        return
    wanted = _checkpoint(group).metrics
    if row.metrics != wanted:
        raise ConfigError(
            f"an imported checkpoint {group.checkpoint!r} exists, of {row.metrics}; these trials are of {wanted}. "
            "Give another --checkpoint name"
        )
    for evaluation in store.evaluations.list(checkpoint_ids=[row.id], suite=group.suite).items:
        if evaluation.settings != dict(group.trials[0].settings):
            raise ConfigError(
                f"checkpoint {group.checkpoint!r} was measured on {group.suite} with other settings "
                f"({evaluation.settings}, now {dict(group.trials[0].settings)}). Give another --checkpoint name"
            )
        before = AnalysisQueries(store).task_digests(group.suite, evaluation.suite_digest)
        for t in group.trials:
            if before.get(t.task, t.task_digest) != t.task_digest:
                raise ConfigError(
                    f"checkpoint {group.checkpoint!r} was measured on another version of task {t.task} of {group.suite}; "
                    "versions are not averaged. Give another --suite name"
                )


def _checkpoint(group: _Group) -> m.Checkpoint:
    first = group.trials[0]
    origin = {"imported": "harbor", "model": first.model, "agent": first.agent, "agent_version": first.agent_version}
    return m.Checkpoint(cycle_id=None, name=group.checkpoint, actor_digest="", retained=True, metrics=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suite:
    digest: str
    tasks: Mapping[str, tuple[str, Stratum]]  # task id -> family, stratum


def _suite(store: Store, group: _Group) -> _Suite:
    """The stored version that has every task of the group unchanged, newest first; else a new version."""
    own = {t.task: t.task_digest for t in group.trials}
    for known in reversed([s for s in store.suites.list() if s.name == group.suite]):
        assert known.id is not None
        rows = {t.task_id: t for t in store.suites.tasks(known.id, limit=1_000_000).items}
        if all(task in rows and rows[task].digest == digest for task, digest in own.items()):
            return _Suite(digest=known.digest, tasks={t: (rows[t].family, rows[t].stratum) for t in own})
    families: dict[str, tuple[str, Stratum]] = {}
    for task in own:  # an earlier version knows the family, which no trial tells
        row = store.suites.task(group.suite, task)
        families[task] = (row.family, row.stratum) if row else (group.suite, Stratum.MEDIUM)
    tasks = [
        Task(
            id=task,
            suite=group.suite,
            family=families[task][0],
            stratum=families[task][1],
            instruction="",
            root=Path(),
            digest=digest,
        )
        for task, digest in own.items()
    ]
    digest = suite_digest(own.items())
    store.suites.register(group.suite, digest, m.Split.HELD_OUT, tasks, version=group.version or "1")
    return _Suite(digest=digest, tasks=families)


def _attempts(group: _Group, suite: _Suite, skipped: list[str], notes: list[str]) -> Iterator[tuple[Trajectory, int]]:
    """Trajectories with the number of tokens their models wrote; damaged trials go to `skipped`."""
    numbers: dict[str, int] = defaultdict(int)
    for trial in group.trials:
        try:
            transcript = read_transcript(trial.folder)
        except TrialError as error:
            notes.append(f"{error}; its turns are left out, its result is kept")
            transcript = Transcript(format="")
        family, stratum = suite.tasks[trial.task]
        try:
            yield (
                trajectory_of(
                    trial,
                    transcript,
                    id=hashlib.sha256(f"harbor\0{group.checkpoint}\0{trial.id}".encode()).hexdigest()[:24],
                    attempt=numbers[trial.task],
                    suite=group.suite,
                    family=family,
                    stratum=stratum,
                    checkpoint=group.checkpoint,
                ),
                trial.output_tokens if trial.output_tokens is not None else transcript.output_tokens or 0,
            )
        except TrialError as error:
            skipped.append(str(error))
            continue
        numbers[trial.task] += 1


def _chunks(attempts: Iterator[tuple[Trajectory, int]]) -> Iterator[list[tuple[Trajectory, int]]]:
    while chunk := list(islice(attempts, CHUNK)):
        yield chunk


def _store(store: Store, chunk: Sequence[tuple[Trajectory, int]], checkpoint_id: int) -> None:
    trajectories = [t for t, _ in chunk]
    with store.transaction():
        store.trajectories.add(trajectories, phase=Phase.EVALUATE, checkpoint_ids=[checkpoint_id] * len(chunk))
        AnalysisQueries(store).set_sampled({t.id: n for t, n in chunk})


def _evaluate(store: Store, group: _Group, suite: _Suite, checkpoint_id: int) -> ImportedEvaluation | None:
    """The evaluation over every stored trial of the checkpoint on this suite, earlier imports included."""
    rows = AnalysisQueries(store).outcomes(TrajectoryFilter(checkpoint_id=checkpoint_id, suite=group.suite))
    known = AnalysisQueries(store).task_digests(group.suite, suite.digest)
    by_task = defaultdict(list)
    for row in sorted(rows, key=lambda r: (r.task_id, r.attempt, r.id)):
        if row.task_id in known:
            by_task[row.task_id].append(row)
    if not by_task:
        return None
    tasks = tuple(
        TaskScore(
            task_id=task,
            family=own[0].family,
            stratum=own[0].stratum.value,
            verdicts=tuple(r.verdict for r in own),
            checks_passed=tuple(r.progress for r in own),
            checks_total=max(r.n_checks for r in own),
        )
        for task, own in by_task.items()
    )
    every = [r for own in by_task.values() for r in own]
    counts = Counter(len(own) for own in by_task.values())
    record = EvaluationDone(
        suite=group.suite,
        suite_digest=suite.digest,
        checkpoint=group.checkpoint,
        k=max(counts, key=lambda n: (counts[n], n)),  # most tasks have k attempts; the others are flagged
        passed=sum(r.verdict is Verdict.PASSED for r in every),
        attempts=len(every),
        verdicts=sum(r.verdict.counts for r in every),
        tasks=tasks,
        turns=sum(r.n_turns for r in every),
        tokens=sum(r.n_sampled for r in every),
        wall_s=sum(r.duration_s for r in every),
        settings=dict(group.trials[0].settings),
    )
    with store.transaction():
        evaluation_id = store.evaluations.save(record, checkpoint_id=checkpoint_id)
        payload = {"evaluation": evaluation_id, "checkpoint": group.checkpoint, "suite": group.suite}
        counted = {"passed": record.passed, "attempts": record.attempts, "verdicts": record.verdicts}
        store.events.append(m.EventKind.EVALUATION_DONE, payload=payload | counted)
    return ImportedEvaluation(
        evaluation_id=evaluation_id,
        checkpoint_id=checkpoint_id,
        checkpoint=group.checkpoint,
        suite=group.suite,
        tasks=len(tasks),
        passed=record.passed,
        verdicts=record.verdicts,
        attempts=record.attempts,
    )
