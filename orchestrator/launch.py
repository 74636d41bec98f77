"""People's wishes about cycles: launch, pause, resume, cancel. Used by the command line and the console alike."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from orchestrator import lineage, transitions, workers
from orchestrator import models as m
from orchestrator.costs import predict
from orchestrator.embedded import database
from orchestrator.inputs import load_suites, model_folder, refuse_unsupported, refuse_without_servers
from orchestrator.plan import stage_rows
from orchestrator.recipes import load_recipe
from orchestrator.reconcile import reconcile_store
from orchestrator.settings import Settings, get_settings
from orchestrator.store import Store
from stages.config import CycleConfig
from stages.errors import ServiceError

DISTRIBUTION = "terminal-rsi"
CLOCKED = "the terminus2 harness waits by the clock: what a screen shows depends on the machine"
SERVED = "its SGLang servers batch by the clock: what is sampled depends on the machines"


def _timing(config: CycleConfig) -> str:
    """Why equal digests cannot be promised for this recipe; empty: they can."""
    if config.sampler.backend == "sglang":
        return SERVED
    return CLOCKED if config.uses_harness("terminus2") else ""


class NotStarted(ServiceError):
    """A cycle was stored, but no Prefect server took it: it is failed and can be resumed."""

    def __init__(self, cycle_id: int, why: str) -> None:
        super().__init__(why)
        self.cycle_id = cycle_id


def launch_cycle(
    recipe: str,
    *,
    name: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    actor: str = "cli",
    settings: Settings | None = None,
    store: Store | None = None,
) -> int:
    """Check a recipe, store a cycle with its planned stages, and ask a worker to run it; returns the cycle's id.

    Raises:
        ConfigError, ModelError, TaskError: the recipe cannot be run; nothing was stored.
        ServiceError: no Prefect server answers; the cycle is stored as failed and can be resumed.
    """
    settings = settings or get_settings()
    config = load_recipe(recipe, name=name, overrides=overrides)
    own = store or Store.open(database.url(settings), settings.artifacts)
    try:
        return launch_config(own, config, actor=actor, settings=settings)
    finally:
        if store is None:
            own.close()


def launch_config(
    store: Store, config: CycleConfig, *, actor: str, settings: Settings, cloned_from: int | None = None
) -> int:
    """As `launch_cycle`, for a configuration that is complete: the launch form's, perhaps a changed clone's."""
    refuse_unsupported(config)
    refuse_without_servers(config, settings)
    model_folder(config)
    load_suites(config, settings)  # a broken or overlapping suite is refused before anything is stored
    cycle = create_cycle(store, config, actor=actor, cloned_from=cloned_from)
    assert cycle.id is not None
    try:
        _submit(store, cycle.id, previous=None, settings=settings)
    except ServiceError as error:
        raise NotStarted(cycle.id, str(error)) from error
    return cycle.id


def create_cycle(store: Store, config: CycleConfig, *, actor: str, cloned_from: int | None = None) -> m.Cycle:
    """Store a queued cycle and its stages. Checks the base model first: nothing is stored for one that is incomplete."""
    model_folder(config)
    if config.fork is not None:
        store.cycles.get(config.fork.cycle)
        lineage.inherited(store, config.fork.cycle, config.fork.stage)
    values = config.model_dump(mode="json", by_alias=True)
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    with store.transaction():
        cycle = store.cycles.create(
            m.Cycle(
                name=config.name,
                recipe=config.recipe,
                config=values,
                config_digest=hashlib.sha256(canonical.encode()).hexdigest(),
                seed=config.seed,
                base_checkpoint=str(config.model) if config.model else "shipped",
                cloned_from_id=cloned_from,
                code_version=metadata.version(DISTRIBUTION),
                environment=_environment(config),
                estimate=predict(store, config, like=cloned_from).values(),
                created_by=actor,
                digest_claim_void=_timing(config),
            )
        )
        assert cycle.id is not None
        store.cycles.add_arm(m.Arm(cycle_id=cycle.id, name="main", retained=True))
        store.stages.plan(cycle.id, stage_rows(config))
        store.audit_trail.add(
            actor,
            "cycle.launch",
            object_kind="cycle",
            object_id=cycle.id,
            payload={"recipe": config.recipe, "cloned_from": cloned_from},
        )
    return cycle


def pause_cycle(store: Store, cycle_id: int, *, actor: str) -> m.CycleState:
    """Stop at the next safe boundary. Raises ConfigError when it cannot be paused."""
    return transitions.pause(store, cycle_id, actor)


def resume_cycle(store: Store, cycle_id: int, *, actor: str, settings: Settings | None = None) -> m.CycleState:
    """Continue from the last finished record; returns the state that the cycle is in then.

    A cycle whose process was killed is found out first. `running` means that a process holds it: nothing was started.
    Raises ConfigError when it cannot be resumed, ServiceError without Prefect.
    """
    settings = settings or get_settings()
    before = store.cycles.get(cycle_id)
    if before.state in transitions.HELD_BY_PROCESS:
        reconcile_store(store, settings)
        before = store.cycles.get(cycle_id)
    state = transitions.resume(store, cycle_id, actor)
    if state is m.CycleState.RESUMING:
        _submit(store, cycle_id, previous=before.flow_run_id, settings=settings)
    return state


def cancel_cycle(store: Store, cycle_id: int, *, actor: str, settings: Settings | None = None) -> m.CycleState:
    """Stop for good. What was recorded stays. Raises ConfigError when it is done already."""
    state = transitions.cancel(store, cycle_id, actor)
    flow_run_id = store.cycles.get(cycle_id).flow_run_id
    if state is m.CycleState.CANCELLED and flow_run_id:
        # No process had taken the cycle: its queued flow run must not start one. Without a server there is none to start.
        with contextlib.suppress(ServiceError):
            workers.cancel_flow_run(flow_run_id, settings=settings or get_settings())
    return state


def _submit(store: Store, cycle_id: int, *, previous: str | None, settings: Settings) -> None:
    config = store.cycles.get(cycle_id).config
    try:
        flow_run_id = workers.submit_cycle(
            cycle_id,
            previous_flow_run_id=previous,
            settings=settings,
            deployment=workers.deployment_of(config),
            gpu_class=workers.gpu_class_of(config),
        )
    except ServiceError as error:
        transitions.enter(store, cycle_id, m.CycleState.FAILED, error=f"It could not be started: {error}")
        raise
    store.cycles.beat(cycle_id, flow_run_id)


def _environment(config: CycleConfig) -> dict[str, Any]:
    """What the digest claim holds for: one machine type, torch build and thread count (design: invariant 6)."""
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "num_threads": config.learner.num_threads,
    }
