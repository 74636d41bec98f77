"""Something on every page of the console, and an example of every page's address: for tests that walk all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from orchestrator.audit_jobs import order
from orchestrator.audits import AuditSpec, run_audit
from orchestrator.experiments.run import register
from orchestrator.store import Store, TrajectoryFilter
from tests.analysis_world import Analysed, seed_analysis
from tests.console_cycle import Seeded, seed_cycle, stretch_times
from tests.console_people import person
from tests.integration.test_webui_experiments import done, spec
from tests.review_world import Gate, open_gate

NO_PAGES = {  # GET addresses that answer with something else than a page of their own
    "/events": "a stream",
    "/healthz": "a probe",
    "/jump": "sends on",
    "/sign-in/oidc": "sends on",
    "/sign-in/oidc/back": "sends on",
}
SIGN_IN = {"/sign-in", "/sign-in/link"}  # for who is not signed in


@dataclass(frozen=True, slots=True)
class Everything:
    store: Store
    analysed: Analysed
    running: Seeded
    gate: Gate
    audit_id: int
    job: int  # an audit that failed
    experiment_id: int
    login: str  # somebody with all roles and notices


def seed_everything(store: Store, folder: Path) -> Everything:
    user = person(store)
    store.api_tokens.make(user.id or 0, "reports", ["see"])
    analysed = seed_analysis(store, folder)
    running = seed_cycle(store, folder, name="live", until=2, running=True, offset=2_000_000)
    for cycle in (analysed.seeded.cycle, running.cycle):
        stretch_times(store, cycle.id or 0)
    gate = open_gate(store, folder, clean=2)
    spec_of_all = AuditSpec(where=TrajectoryFilter(cycle_id=analysed.seeded.cycle.id), name="every attempt")
    audit = run_audit(store, spec_of_all, created_by="ada")
    job = order(store, spec_of_all, attempts=30_000, created_by="ada")
    store.audit_jobs.finish(job, error="no memory")
    asked = spec()
    number = register(store, asked, actor="ada").id or 0
    for arm in asked.arms():
        for seed in (0, 1):
            done(store, asked, number, arm.name, seed)
    return Everything(store, analysed, running, gate, audit.id or 0, job, number, user.login)


def page_routes(app: FastAPI) -> Iterator[str]:
    """The path of every GET route whose answer is a page."""
    pending: list[BaseRoute] = list(app.routes)
    while pending:
        route = pending.pop()
        if hasattr(route, "original_router"):
            pending += route.original_router.routes
        elif isinstance(route, APIRoute) and "GET" in (route.methods or ()) and route.path not in NO_PAGES:
            data = route.path.startswith("/api/v1/") or "." in route.path.rpartition("/")[2]
            if not data:
                yield route.path


def examples(of: Everything) -> dict[str, list[str]]:
    """Route -> addresses of it, each with something to see."""
    cycle, live, gate = of.analysed.seeded.cycle.id, of.running.cycle.id, of.gate
    points = ",".join(str(c.id) for c in of.analysed.checkpoints)
    compare = f"/compare?c={points}&suite=heldout-names"
    views = ("scores", "matrix", "strata", "curves", "config", "cost", "selection")
    return {
        "/": ["/"],
        "/account": ["/account"],
        "/api/v1": ["/api/v1"],
        "/audit-log": ["/audit-log"],
        "/audits": ["/audits"],
        "/audits/new": ["/audits/new"],
        "/audits/jobs/{number:int}": [f"/audits/jobs/{of.job}"],
        "/audits/{audit_id:int}": [f"/audits/{of.audit_id}"],
        "/checkpoints": ["/checkpoints"],
        "/checkpoints/{checkpoint_id:int}": [f"/checkpoints/{of.analysed.checkpoints[2].id}"],
        "/compare": ["/compare", *(f"{compare}&view={view}" for view in views)],
        "/cycles": ["/cycles"],
        "/cycles/new": ["/cycles/new?recipe=smoke", f"/cycles/new?from={gate.cycle_id}"],
        "/cycles/{cycle_id:int}": [f"/cycles/{cycle}", f"/cycles/{live}", f"/cycles/{gate.cycle_id}"],
        "/cycles/{cycle_id:int}/analysis": [f"/cycles/{cycle}/analysis"],
        "/cycles/{cycle_id:int}/cancel": [f"/cycles/{live}/cancel"],
        "/cycles/{cycle_id:int}/config": [f"/cycles/{cycle}/config"],
        "/cycles/{cycle_id:int}/logs": [f"/cycles/{cycle}/logs"],
        "/cycles/{cycle_id:int}/stages/{name}": [
            *(f"/cycles/{cycle}/stages/{stage}" for stage in ("rpr-1?smooth=5", "base")),
            f"/cycles/{live}/stages/rsr-1",
        ],
        "/experiments": ["/experiments"],
        "/experiments/{experiment_id:int}": [f"/experiments/{of.experiment_id}"],
        "/inbox": ["/inbox"],
        "/lineage": ["/lineage"],
        "/people": ["/people"],
        "/reviews": ["/reviews", "/reviews?state=all"],
        "/reviews/{runbook_id}": [
            f"/reviews/{gate.soft}",
            f"/reviews/{gate.hard}",
            f"/reviews/{gate.soft}?hidden=1",
            f"/reviews/{gate.clean[0]}?edit=1",
        ],
        "/sign-in": ["/sign-in"],
        "/sign-in/link": ["/sign-in/link?key=none"],
        "/suspicious": ["/suspicious"],
        "/tasks/{pool}/{task_id:path}": ["/tasks/heldout-names/heldout-names-0001"],
        "/tokens": ["/tokens"],
        "/trajectories": ["/trajectories", "/trajectories?verdict=passed&task=none"],
        "/trajectories/{trajectory_id}": [f"/trajectories/{of.analysed.seeded.hostile_id}"],
        "/trajectories/{trajectory_id}/tokens": [f"/trajectories/{of.analysed.trained.id}/tokens?turn=1"],
    }
