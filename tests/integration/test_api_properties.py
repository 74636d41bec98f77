"""The API against its own document: whatever a request that fits it holds, no 5xx, and an answer that fits it, too.

The store is real, with a gate that waits for verdicts; half of the requests name rows that exist. 503 counts as an answer
only where the document says that an operation needs a service: Prefect is not running here.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from orchestrator import models as m
from orchestrator.store import Store
from tests.analysis_world import seed_analysis
from tests.console_people import SignedIn, app_for, client_as
from tests.review_world import open_gate
from webui.api.reference import document

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
LAUNCHES = {"/api/v1/cycles", "/api/v1/cycles/estimate"}  # a valid body generates suites: few of them


def _schema() -> Any:
    told = copy.deepcopy(document())
    del told["security"], told["components"]["securitySchemes"]  # we sign in ourselves
    return schemathesis.openapi.from_dict(told)


SCHEMA = _schema()
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]


@dataclass
class World:
    app: FastAPI
    ids: dict[str, list[Any]]  # path parameter -> rows that exist
    clients: dict[str, SignedIn]


@pytest.fixture(scope="module")
def world(module_store: Store, module_folder: Path) -> World:
    store, folder = module_store, module_folder
    analysed = seed_analysis(store, folder)
    gate = open_gate(store, folder, clean=2)
    app = app_for(store)
    clients = {role.value: client_as(app, role, login=f"the-{role}") for role in m.Role} | {"all": client_as(app)}
    for client in clients.values():
        client.headers["X-CSRF-Token"] = client.csrf
    guest = store.users.add("guest", [m.Role.ANALYST])
    audit = clients["all"].post("/api/v1/audits", json={"cycle": str(analysed.seeded.cycle.id)}).json()["audit"]
    job = store.audit_jobs.add(m.AuditJob(name="failed", attempts=30_000, state=m.AuditJobState.FAILED, spec={}))
    ids = {
        "cycle_id": [analysed.seeded.cycle.id, gate.cycle_id],
        "name": ["rsr-1", "RPR-2"],
        "checkpoint_id": [c.id for c in analysed.checkpoints],
        "evaluation_id": [e.id for e in store.evaluations.list(limit=3).items],
        "trajectory_id": [analysed.seeded.hostile_id, analysed.trained.id],
        "runbook_id": [*gate.clean, gate.soft, gate.hard, analysed.seeded.runbook_id],
        "audit_id": [audit],
        "number": [job],
        "suite_id": [s.id for s in store.suites.list()],
        "pool": ["heldout-names"],
        "task_id": ["heldout-names-0001"],
        "user_id": [guest.id],
        "checkpoint": [analysed.checkpoints[0].id],
        "cycle": [analysed.seeded.cycle.id],
        "c": [[f"{analysed.checkpoints[0].id},{analysed.checkpoints[4].id}"]],
    }
    return World(app, ids, clients)


def send(world: World, client: SignedIn, case: Any, known: bool) -> None:
    """One request, checked against the document. `known`: with rows that exist where the address names some."""
    if known:
        for values in (case.path_parameters, case.query):
            for name in set(values or {}) & world.ids.keys():
                values[name] = world.ids[name][len(str(values)) % len(world.ids[name])]
    path = case.path
    if path in LAUNCHES and isinstance(case.body, dict) and not case.body.get("recipe"):
        case.body["recipe"] = "smoke"
    kwargs = {k: v for k, v in case.as_transport_kwargs(base_url="http://testserver").items() if v is not None}
    sent = {k: kwargs[k] for k in ("params", "json", "data") if k in kwargs}
    answer = client.request(case.method, kwargs["url"], **sent)
    if answer.status_code == 503 and "503" in case.operation.definition.raw["responses"]:
        return
    checks = [*CHECKS, not_a_server_error]
    case.validate_response(answer, checks=checks)


def run(world: World, client: SignedIn, operation: Any, examples: int) -> None:
    @settings(
        max_examples=1 if examples < 10 else 3 if operation.path in LAUNCHES else examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), known=st.booleans())
    def against(case: Any, known: bool) -> None:
        send(world, client, case, known)

    against()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: f"{o.method} {o.path}")
def test_no_5xx_and_answers_fit_the_document(world: World, operation: Any) -> None:
    run(world, world.clients["all"], operation, 4)


@pytest.mark.full
@pytest.mark.parametrize("role", ["all", *m.Role])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: f"{o.method} {o.path}")
def test_no_5xx_for_any_role(world: World, operation: Any, role: str) -> None:
    run(world, world.clients[role], operation, 40)


@pytest.mark.parametrize("role", list(m.Role))
def test_reads_of_every_role_on_rows_that_exist(world: World, role: m.Role) -> None:
    """The plain request of every GET, by each role: told, or hidden as 404."""
    for operation in OPERATIONS:
        if operation.method.upper() != "GET":
            continue
        values = {p.name: world.ids.get(p.name, [1])[0] for p in operation.path_parameters}
        case = operation.Case(path_parameters=values)
        answer = world.clients[role].get(case.formatted_path)
        assert answer.status_code in (200, 404, 422), (case.formatted_path, answer.text)
        case.validate_response(answer, checks=[*CHECKS, not_a_server_error])


def test_bodies_that_no_database_can_hold(world: World) -> None:
    client, (book, *_) = world.clients["all"], world.ids["runbook_id"]
    for body in (b'{"text": "a\\u0000b"}', b'{"text": "\\ud800"}', b"[" * 5000, b'{"text": NaN}', b"\xff", b""):
        answer = client.post(
            f"/api/v1/reviews/{book}/comment", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (400, 422), (body[:20], answer.text)
        assert set(json.loads(answer.text)) == {"error", "what", "where", "next", "fields"}
