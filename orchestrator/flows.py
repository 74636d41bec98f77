"""Prefect flows: thin. One flow run is the process that works on one cycle; each stage is a subflow run in it.

The cycle's state and everything needed to continue it stand in our tables; a flow run may be lost at any moment.
"""

from __future__ import annotations

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from orchestrator.embedded import database
from orchestrator.heartbeat import beating
from orchestrator.holding import settle
from orchestrator.runner import Runner, open_cycle
from orchestrator.settings import get_settings
from orchestrator.store import Store


@flow(name="run-stage", flow_run_name="{stage}", validate_parameters=False, log_prints=False)
def run_stage_flow(runner: Runner, stage: str) -> None:
    """One stage, from its last finished record on. Does nothing when it is done."""
    runner.run_stage(stage)


@flow(name="run-cycle", flow_run_name="cycle-{cycle_id}")
def run_cycle_flow(cycle_id: int) -> str:
    """Work on a cycle until it is done, paused, suspended at a gate or cancelled; returns that state."""
    logger = get_run_logger()
    settings = get_settings()
    store = Store.open(database.url(settings), settings.artifacts)
    try:
        with (
            # first: a second process must not beat for the one that holds the cycle
            settle(store, cycle_id, settings) as outcome,
            beating(store, cycle_id, str(flow_run.id) if flow_run.id else None),
            open_cycle(store, settings, cycle_id) as runner,
        ):
            for stage in runner.pending():
                run_stage_flow(runner, stage)
        logger.info("cycle %s is %s", cycle_id, outcome.state)
        return str(outcome.state)
    finally:
        store.close()
