"""Stored attempts as Harbor job folders: one job per model, phase and suite."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator import models as m
from orchestrator.store import Store, TrajectoryFilter
from orchestrator.store.trajectories import TrajectoryDetail
from stages.domain import Boundary, CheckResult, Phase, Trajectory, Turn
from stages.errors import StoreError, TrialError
from stages.trials.write import ExportJob, ExportTrial, safe_name, write_job

PAGE = 200
_SECRET_NAMES = ("key", "token", "secret", "passw", "auth", "credential", "url", "host", "path", "folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedJob:
    folder: Path
    model: str
    suite: str
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Attempts that become one job."""

    model: str
    phase: Phase | None
    suite: str
    rows: tuple[m.Trajectory, ...]
    settings: Mapping[str, Any]


def export_evaluation(store: Store, evaluation_id: int, folder: Path) -> tuple[ExportedJob, ...]:
    """One evaluation as one job folder. Raises StoreError when there is none, TrialError when nothing can be written."""
    e = store.evaluations.get(evaluation_id)
    if e.cycle_id is not None and e.stage_id is None:
        raise TrialError(
            f"evaluation {evaluation_id} was made by `rsi evaluate`, which stores each task's outcomes and no transcripts; "
            f"`rsi export trials cycle:{e.cycle_id} DIR` writes what the cycle itself attempted"
        )
    where = TrajectoryFilter(
        cycle_id=e.cycle_id, stage_id=e.stage_id, checkpoint_id=e.checkpoint_id, suite=e.suite, phase=Phase.EVALUATE
    )
    rows = tuple(r for r in _rows(store, where) if e.checkpoint_id is not None or r.weight_version == e.checkpoint)
    group = _Group(model=e.checkpoint, phase=Phase.EVALUATE, suite=e.suite, rows=rows, settings=_public(e.settings))
    return (_write(store, folder, group, digest=e.suite_digest, k=e.k),)


def export_checkpoint(
    store: Store, checkpoint: m.Checkpoint, folder: Path, watch: Callable[[str], None] = lambda text: None
) -> tuple[ExportedJob, ...]:
    """Everything that a checkpoint attempted, a job folder per phase and suite below `folder`."""
    return _export(store, TrajectoryFilter(checkpoint_id=checkpoint.id), folder, watch)


def export_cycle(
    store: Store, cycle_id: int, folder: Path, watch: Callable[[str], None] = lambda text: None
) -> tuple[ExportedJob, ...]:
    """Everything that a cycle attempted, a job folder per model, phase and suite below `folder`."""
    store.cycles.get(cycle_id)
    return _export(store, TrajectoryFilter(cycle_id=cycle_id), folder, watch)


def _export(
    store: Store, where: TrajectoryFilter, folder: Path, watch: Callable[[str], None]
) -> tuple[ExportedJob, ...]:
    """The whole folder appears at once, or not at all."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise TrialError(f"{folder} exists and is not empty: name a new folder, nothing is overwritten")
    staged = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    done: list[ExportedJob] = []
    try:
        for group in _groups(store, where):
            name = _free(staged, (group.model, group.phase or "attempts", group.suite))
            done.append(_write(store, staged / name, group))
            watch(f"{name}: {done[-1].trials} trials")
        if not done:
            raise TrialError("there is no attempt to export")
        if folder.exists():
            folder.rmdir()
        staged.rename(folder)
    except OSError as error:
        raise TrialError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return tuple(
        ExportedJob(folder=folder / j.folder.name, model=j.model, suite=j.suite, trials=j.trials) for j in done
    )


def _free(folder: Path, parts: Sequence[str]) -> str:
    """A folder name of these parts that no other job has: two cycles may share them, and so may names that look alike."""
    name = "__".join(safe_name(part)[:60] for part in parts)
    number = 1
    while (folder / (found := name if number == 1 else f"{name}__{number}")).exists():
        number += 1
    return found


def _groups(store: Store, where: TrajectoryFilter) -> Iterator[_Group]:
    by: dict[tuple[str, Phase | None, str, int | None], list[m.Trajectory]] = {}
    for row in _rows(store, where):
        by.setdefault((row.weight_version, row.phase, row.suite, row.cycle_id), []).append(row)
    for (model, phase, suite, cycle_id), rows in by.items():
        settings = {"harness": _harness(store, cycle_id, phase), "phase": phase.value if phase else ""}
        yield _Group(model=model, phase=phase, suite=suite, rows=tuple(rows), settings=settings)


def _harness(store: Store, cycle_id: int | None, phase: Phase | None) -> str:
    """The harness that a cycle's configuration names for a phase; `unknown` for imported attempts."""
    config = store.cycles.get(cycle_id).config if cycle_id is not None else {}
    if phase is Phase.REPLAY:
        named = [r.get("replay", {}).get("harness") for r in config.get("rsr", [])]
        if set(named) - {None}:
            return "+".join(sorted({n or config["rollout"]["harness"] for n in named}))
    return str(config.get("rollout", {}).get("harness", "unknown"))


def _rows(store: Store, where: TrajectoryFilter) -> list[m.Trajectory]:
    """Oldest first."""
    rows: list[m.Trajectory] = []
    before: int | None = None
    while True:
        page = store.trajectories.list(where, before=before, limit=PAGE)
        rows += page.items
        if page.next is None:
            return rows[::-1]
        before = page.next


def _write(
    store: Store, folder: Path, group: _Group, *, digest: str | None = None, k: int | None = None
) -> ExportedJob:
    # A suite that was measured again at another size is another version: each task is told as the version has it that
    # was there when it was attempted, and tasks that this one lacks as the others have them.
    begun = min((r.created_at for r in group.rows), default=None)
    versions = sorted(
        (s for s in store.suites.list() if s.name == group.suite),
        key=lambda s: (s.digest == digest, begun is not None and s.created_at <= begun, s.id),
    )
    tasks: dict[str, m.Task] = {}
    for version in versions:
        tasks |= {t.task_id: t for t in store.suites.tasks(version.id or 0, limit=1_000_000).items}
    suite = versions[-1] if versions else None
    most = max(Counter(r.task_id for r in group.rows).values(), default=1)
    job = ExportJob(
        name=folder.name,
        model=group.model,
        suite=group.suite,
        suite_version=suite.version if suite else "",
        version=metadata.version("terminal-rsi"),
        settings=group.settings,
        attempts_per_task=k or most,
    )
    return ExportedJob(
        folder=folder,
        model=group.model,
        suite=group.suite,
        trials=write_job(folder, job, _trials(store, group.rows, tasks)),
    )


def _trials(store: Store, rows: Sequence[m.Trajectory], tasks: Mapping[str, m.Task]) -> Iterator[ExportTrial]:
    for row in rows:
        task = tasks.get(row.task_id)
        try:
            detail = store.trajectories.detail(row.id, turns=1_000_000)
        except StoreError:  # repeated by a resumed run, or deleted, since the list was read
            continue
        yield ExportTrial(
            trajectory=_domain(detail),
            instruction=task.instruction if task else "",
            task_digest=task.digest if task else "",
            finished=row.created_at,
        )


def _domain(detail: TrajectoryDetail) -> Trajectory:
    """What was shown and checked; no token arrays."""
    row = detail.trajectory
    return Trajectory(
        id=row.id,
        task_id=row.task_id,
        family=row.family,
        stratum=row.stratum,
        attempt=row.attempt,
        seed=row.seed,
        turns=tuple(
            Turn(
                index=t.index,
                action=t.action,
                observation=t.observation,
                exit_code=t.exit_code,
                timed_out=t.timed_out,
                segment=t.segment,
                start=t.start,
                end=t.end,
                duration_s=t.duration_s,
            )
            for t in detail.turns
        ),
        segments=(),
        checks=tuple(
            CheckResult(id=c.check_id, role=c.role, status=c.status, message=c.message) for c in detail.checks
        ),
        end_reason=row.end_reason,
        verdict=row.verdict,
        weight_version=row.weight_version,
        boundaries={Boundary(name): n for name, n in row.boundaries.items()},
        flags=tuple(row.flags),
        duration_s=row.duration_s,
        suite=row.suite,
        verifier_log=row.verifier_log,
    )


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what may be secret or names a machine."""
    return {
        key: value
        for key, value in settings.items()
        if isinstance(value, str | int | float) and not any(word in key.lower() for word in _SECRET_NAMES)
    }
