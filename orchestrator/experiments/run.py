"""Runs an experiment in this process: branch by branch, seed by seed, resumable by the same call after any interruption.

Every branch is a cycle of its own with rows, checkpoints and logs like any other; arms fork from the cycle of their shared
prefix. A branch that failed does not stop the others; what hangs on it is skipped, and the next run tries it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from orchestrator import models as m
from orchestrator import transitions
from orchestrator.embedded import control, database, postgres
from orchestrator.experiments.coincide import refuse_coinciding, refuse_impossible
from orchestrator.experiments.spec import ArmSpec, ExperimentSpec
from orchestrator.experiments.spent import base_tokens_per_attempt, matched, spent
from orchestrator.experiments.tree import Branch, Run, branches
from orchestrator.heartbeat import beating
from orchestrator.holding import PauseRequested
from orchestrator.inputs import load_suites, refuse_unsupported, refuse_without_servers
from orchestrator.launch import create_cycle
from orchestrator.reconcile import HEARTBEAT_S
from orchestrator.runner import run_cycle
from orchestrator.settings import Settings
from orchestrator.store import Store, schema
from stages.config import CycleConfig, ForkConfig
from stages.errors import ConfigError, RsiError, StoreError
from stages.records import Record

S = m.CycleState


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Who is told what. Every call comes from the thread that runs."""

    say: Callable[[str], None] = lambda text: None
    record: Callable[[Branch, m.Stage, Record], None] = lambda branch, stage, record: None
    stop: Callable[[], bool] = lambda: False  # asked after every record


@dataclass(slots=True)
class Outcome:
    """How far a call came."""

    done: int = 0  # branches, those that were done before included
    of: int = 0
    stopped: bool = False  # somebody asked; the same call goes on
    failures: dict[str, str] = field(default_factory=dict)  # branch -> why


def checked(spec: ExperimentSpec) -> dict[Run, CycleConfig]:
    """The cycle of every arm and seed, seed by seed; matched arms as far as they are known before their model ran.

    Raises ConfigError for an arm that cannot run, and for two that coincide.
    """
    arms = spec.arms()
    for arm in arms:
        config = spec.config(arm, spec.seeds[0])
        refuse_unsupported(config)
        refuse_impossible(arm.name, config)
    refuse_coinciding({a.name: spec.config(a, spec.seeds[0]) for a in arms if a.match is None})
    return {(a.name, seed): spec.config(a, seed) for seed in spec.seeds for a in arms}


def register(store: Store, spec: ExperimentSpec, *, actor: str) -> m.Experiment:
    """The experiment's rows. Raises ConfigError when another specification has its name."""
    with store.transaction():
        row = store.experiments.create(spec.name, spec.values(), spec.digest, actor=actor)
        if row.spec_digest != spec.digest:
            changed = sorted(k for k in spec.values() if row.spec.get(k) != spec.values()[k])
            raise ConfigError(
                f"experiment {spec.name!r} was begun with another specification ({', '.join(changed)} changed); give the new "
                "one another name. Only seeds may be added."
            )
        assert row.id is not None
        store.experiments.plan_runs(row.id, [(a.name, seed) for seed in spec.seeds for a in spec.arms()])
        store.audit_trail.add(
            actor, "experiment.run", object_kind="experiment", object_id=row.id, payload={"seeds": list(spec.seeds)}
        )
    return row


def run_experiment(
    store: Store, settings: Settings, spec: ExperimentSpec, *, actor: str = "cli", watch: Watch | None = None
) -> Outcome:
    """Everything that is not done yet. Returns early, with `stopped`, once `watch.stop` says so.

    Raises ConfigError before anything is stored when the specification cannot be run.
    """
    watch = watch or Watch()
    configs = checked(spec)
    for config in configs.values():
        refuse_without_servers(config, settings)
    # a broken or overlapping suite is refused before anything is stored
    load_suites(next(iter(configs.values())), settings)
    row = register(store, spec, actor=actor)
    assert row.id is not None
    outcome = Outcome()
    known = {run: c for run, c in configs.items() if spec.arm_named(run[0]).match is None}
    outcome.of = len(branches(known)) + len(configs) - len(known)
    _wave(store, settings, spec, row.id, known, outcome, watch)
    late = {}
    for arm, seed in [] if outcome.stopped else [run for run in configs if run not in known]:
        try:
            late[arm, seed] = match_arm(store, row.id, spec, spec.arm_named(arm), seed)
        except RsiError as error:
            outcome.failures[f"{arm}, seed {seed}"] = str(error)
            store.experiments.set_run(row.id, arm, seed, cycle_id=None, error=str(error))
    if late:
        outcome.done = 0
        outcome.of = len(branches(known | late))
        _wave(store, settings, spec, row.id, known | late, outcome, watch)
    return outcome


def match_arm(store: Store, experiment_id: int, spec: ExperimentSpec, arm: ArmSpec, seed: int) -> CycleConfig:
    """The matched arm's cycle, from what its model really spent. Raises ConfigError when that is not done."""
    runs = {(r.arm, r.seed): r for r in store.experiments.runs([experiment_id])}
    goal = runs.get((arm.match or "", seed))
    if goal is None or goal.cycle_id is None or store.cycles.get(goal.cycle_id).state is not S.DONE:
        raise ConfigError(f"arm {arm.name!r} matches {arm.match!r}, which is not done for seed {seed}")
    return matched(spec.config(arm, seed), spent(store, goal.cycle_id), base_tokens_per_attempt(store, goal.cycle_id))


def _wave(
    store: Store,
    settings: Settings,
    spec: ExperimentSpec,
    experiment_id: int,
    configs: Mapping[Run, CycleConfig],
    outcome: Outcome,
    watch: Watch,
) -> None:
    cycles: dict[str, int] = {}  # key of a finished branch -> its cycle
    for branch in branches(configs):
        where = f"{branch.title}, seed {branch.seed} ({branch.label})"
        if branch.parent is not None and branch.parent not in cycles:
            continue  # what it hangs on has failed, which was said
        try:
            cycle_id = _cycle(store, spec, branch, cycles.get(branch.parent or ""))
            for arm, seed in branch.ends:
                store.experiments.set_run(experiment_id, arm, seed, cycle_id=cycle_id)
            if store.cycles.get(cycle_id).state is not S.DONE:
                watch.say(f"[{outcome.done + 1}/{outcome.of}] {where}: cycle {cycle_id}")
                ended = _work(store, settings, branch, cycle_id, watch)
                if ended is not S.DONE and watch.stop():
                    outcome.stopped = True
                    return
                if ended is not S.DONE:
                    raise ConfigError(_resting(cycle_id, ended))
            cycles[branch.key] = cycle_id
            outcome.done += 1
        except RsiError as error:
            outcome.failures[where] = str(error)
            watch.say(f"{where}: {error}")
        if watch.stop():
            outcome.stopped = True
            return


def _cycle(store: Store, spec: ExperimentSpec, branch: Branch, parent: int | None) -> int:
    """The branch's cycle, created now if this is its first time."""
    if (found := store.experiments.branch(branch.key)) is not None:
        return found
    stage = next((s.parent for s in branch.stages[:1]), None)
    config = branch.config.model_copy(
        update={
            "name": f"{spec.name}: {branch.title}, seed {branch.seed} ({branch.label})"[:120],
            "experiment": f"{spec.name}/{branch.label}",
            "fork": ForkConfig(cycle=parent, stage=stage) if parent is not None and stage is not None else None,
        }
    )
    try:
        with store.transaction():
            cycle = create_cycle(store, config, actor="experiment")
            assert cycle.id is not None
            store.experiments.add_branch(branch.key, cycle.id)
        return cycle.id
    except StoreError:
        if (found := store.experiments.branch(branch.key)) is not None:
            return found  # another process was faster
        raise


def _work(store: Store, settings: Settings, branch: Branch, cycle_id: int, watch: Watch) -> m.CycleState:
    def told(stage: m.Stage, record: Record) -> None:
        watch.record(branch, stage, record)
        if watch.stop():
            transitions.pause(store, cycle_id, "experiment")
            raise PauseRequested("stopped on request; the same command goes on")

    with store.experiments.holding(cycle_id) as ours:
        if not ours:
            raise ConfigError(f"another process works on cycle {cycle_id} of this branch; wait for it or stop it")
        if not _ready(store, cycle_id):
            return store.cycles.get(cycle_id).state
        with beating(store, cycle_id):
            return run_cycle(store, settings, cycle_id, on_record=told)


def _ready(store: Store, cycle_id: int) -> bool:
    """Bring a cycle that was interrupted to `resuming`. No process of an experiment has it: we hold the lock."""
    cycle = store.cycles.get(cycle_id)
    if cycle.state in transitions.HELD_BY_PROCESS:
        beat = cycle.heartbeat_at
        if cycle.flow_run_id and beat and (datetime.now(UTC) - beat).total_seconds() < HEARTBEAT_S:
            raise ConfigError(
                f"a worker works on cycle {cycle_id}; wait for it, or pause it first (`rsi cycle pause {cycle_id}`)"
            )
        transitions.enter(store, cycle_id, transitions.LOST.get(cycle.state, S.FAILED), error="its process is gone")
        cycle = store.cycles.get(cycle_id)
    if cycle.state in (S.PAUSED, S.FAILED):
        transitions.resume(store, cycle_id, "experiment")
        return True
    return cycle.state in (S.QUEUED, S.RESUMING)


def _resting(cycle_id: int, ended: m.CycleState) -> str:
    if ended is S.SUSPENDED:
        return f"cycle {cycle_id} waits for people's verdicts on its runbooks (`rsi review list`); then run this again"
    if ended is S.CANCELLED:
        return f"cycle {cycle_id} was cancelled for good; give the experiment another name to run this branch again"
    return f"cycle {cycle_id} is {ended}; run this again"


@contextmanager
def opened(settings: Settings) -> Iterator[Store]:
    """The installation's store. An embedded database that does not run is started, and stopped again at the end."""
    ours = settings.embedded_database and not postgres.is_running(settings.home)
    url = database.start(settings)
    store = Store.open(url, settings.artifacts)
    try:
        schema.upgrade(url)
        yield store
    finally:
        needed = not ours or control.look(settings) is not None or store.experiments.others()  # others came meanwhile
        store.close()
        if not needed:
            postgres.stop(settings.home)
