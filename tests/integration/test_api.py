"""REST `/api/v1` on a real store: what it tells, what it changes, who may, and its errors' one shape."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from orchestrator import models as m
from orchestrator.store import Store
from stages.domain import Phase
from tests import factories
from tests.analysis_world import Analysed, seed_analysis
from tests.console_people import SignedIn, app_for, client_as, person
from webui import urls
from webui.access import Action
from webui.api.listing import BATCH
from webui.api.reference import document


@pytest.fixture(scope="module")
def world(module_store: Store, module_folder: Path) -> Analysed:
    return seed_analysis(module_store, module_folder)


@pytest.fixture(scope="module")
def app(world: Analysed) -> FastAPI:
    return app_for(world.store)


@pytest.fixture(scope="module")
def everybody(app: FastAPI) -> SignedIn:
    client = client_as(app)
    client.headers["X-CSRF-Token"] = client.csrf
    return client


def get(client: TestClient, path: str) -> object:
    answer = client.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_address_of_the_api_is_in_its_document(app: FastAPI) -> None:
    told = document()
    assert told["openapi"].startswith("3.1")
    assert len(told["paths"]) > 40
    for path, methods in told["paths"].items():
        assert path.startswith("/api/v1/")
        for operation in methods.values():
            assert operation["responses"]["422"]["content"]["application/json"]["schema"]["$ref"].endswith("/Problem")
            assert operation["summary"]


def test_the_reference_names_every_operation(everybody: SignedIn) -> None:
    html = everybody.get("/api/v1").text
    for path, methods in document()["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in html
    assert get(everybody, "/openapi.json") == document()


def test_what_a_cycle_tells(everybody: SignedIn, world: Analysed) -> None:
    cycle = world.seeded.cycle.id
    listed = get(everybody, "/cycles?state=done")
    assert [c["id"] for c in listed["items"]] == [cycle]
    told = get(everybody, f"/cycles/{cycle}")
    assert told["config"] == world.seeded.cycle.config
    stages = get(everybody, f"/cycles/{cycle}/stages")
    assert [s["name"] for s in stages] == ["Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2"]
    curve = get(everybody, f"/cycles/{cycle}/stages/rpr-1/metrics?metric=critic/vf_explained_var")
    assert [v["step"] for v in curve if v["phase"] == Phase.JOINT] == list(range(1, 14))
    assert curve[5]["value"] is None  # not measured: never 0
    first = get(everybody, f"/cycles/{cycle}/logs?limit=50")
    rest = get(everybody, f"/cycles/{cycle}/logs?limit=50&cursor={first['next']}")
    assert rest["next"] is None
    assert len({line["id"] for line in [*first["items"], *rest["items"]]}) == 61


def test_lists_go_on_where_they_stopped(everybody: SignedIn, world: Analysed) -> None:
    whole = [t["id"] for t in get(everybody, "/trajectories?limit=500&phase=joint")["items"]]
    found: list[str] = []
    cursor = ""
    while cursor is not None:
        told = get(everybody, f"/trajectories?limit=31&phase=joint{cursor}")
        found += [t["id"] for t in told["items"]]
        cursor = f"&cursor={told['next']}" if told["next"] else None
    assert found == whole
    assert len(found) > 62


def test_trajectory_turns_and_tokens(everybody: SignedIn, world: Analysed) -> None:
    told = get(everybody, f"/trajectories/{world.seeded.hostile_id}")
    assert told["flags"] == ["broke<verifier>"]
    assert len(told["checks"]) == told["n_checks"] + 1
    turns = get(everybody, f"/trajectories/{world.seeded.long_id}/turns?limit=500")
    more = get(everybody, f"/trajectories/{world.seeded.long_id}/turns?limit=500&cursor={turns['next']}")
    assert [t["index"] for t in [*turns["items"], *more["items"]]] == list(range(700))
    tokens = get(everybody, f"/trajectories/{world.trained.id}/tokens?turn=1")
    assert tokens["scored"]
    assert everybody.get(f"/api/v1/trajectories/{world.trained.id}/tokens?turn=99").status_code == 404


def test_checkpoints_lineage_comparison(everybody: SignedIn, world: Analysed) -> None:
    ids = [c.id for c in world.checkpoints]
    listed = get(everybody, "/checkpoints")["items"]
    assert [c["id"] for c in listed] == ids[::-1]
    assert {s["suite"] for s in listed[0]["scores"]} == {"heldout-names", "heldout-combinations"}
    assert get(everybody, f"/checkpoints/{ids[2]}") == next(c for c in listed if c["id"] == ids[2])
    graph = get(everybody, f"/lineage?checkpoint={ids[-1]}")
    assert len(graph["checkpoints"]) == 5
    told = get(everybody, f"/compare?c={ids[0]},{ids[4]}&table=scores&table=differences")
    assert [r["passed"] / r["verdicts"] for r in told["tables"]["scores"]] == [
        r["rate_verdicts"] for r in told["tables"]["scores"]
    ]
    assert told["tables"]["differences"][0]["difference"] > 0.2
    evaluation = get(everybody, f"/evaluations?checkpoint={ids[0]}")["items"][0]
    assert sum(t["passed"] for t in get(everybody, f"/evaluations/{evaluation['id']}")["tasks"]) == evaluation["passed"]


def test_suites_and_tasks(everybody: SignedIn, world: Analysed) -> None:
    (suite,) = get(everybody, "/suites")["items"]
    first = get(everybody, f"/suites/{suite['id']}/tasks?limit=30")
    rest = get(everybody, f"/suites/{suite['id']}/tasks?limit=30&cursor={first['next']}")
    assert len(first["items"]) + len(rest["items"]) == suite["n_tasks"] == 40
    told = get(everybody, f"/tasks/{suite['name']}/{first['items'][0]['task_id']}")
    assert [o["checkpoint"] for o in told["outcomes"]] == ["Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2"]


def test_errors_have_one_shape(everybody: SignedIn, app: FastAPI) -> None:
    csrf = {"X-CSRF-Token": everybody.csrf}
    stranger, analyst = TestClient(app), client_as(app, m.Role.ANALYST)
    for status, answer in (
        (404, everybody.get("/api/v1/cycles/99999")),
        (404, everybody.get("/api/v1/nothing")),
        (405, everybody.delete("/api/v1/cycles", headers=csrf)),
        (422, everybody.get("/api/v1/cycles?limit=0")),
        (422, everybody.get("/api/v1/cycles?cursor=x")),
        (422, everybody.get("/api/v1/trajectories?verdict=odd")),
        (422, everybody.post("/api/v1/reviews/none/decide", json={"decision": "maybe"})),
        (401, stranger.get("/api/v1/cycles")),
        (401, stranger.get("/api/v1/cycles", headers={"Authorization": "Bearer rsi_nothing"})),
        (403, everybody.post("/api/v1/inbox/read", json={}, headers={"X-CSRF-Token": "forged"})),
        (404, analyst.get("/api/v1/reviews")),
        (403, analyst.post("/api/v1/cycles", json={}, headers={"X-CSRF-Token": analyst.csrf})),
        (413, everybody.post("/api/v1/inbox/read", content=b" " * (5 * 2**20))),
    ):
        assert answer.status_code == status, answer.text
        told = answer.json()
        assert set(told) == {"error", "what", "where", "next", "fields"}, told
        assert told["error"]
        assert told["what"]
        assert told["next"]
    told = everybody.get("/api/v1/cycles?limit=0").json()
    assert told["fields"][0]["where"] == "query.limit"


def test_a_launch_names_every_field_that_is_wrong(everybody: SignedIn, world: Analysed) -> None:
    before = get(everybody, "/cycles")
    body = {"recipe": "smoke", "set": {"rounds": 0, "seed": "x", "nothing.here": 1}}
    answer = everybody.post("/api/v1/cycles", json=body)
    assert answer.status_code == 422
    named = {f["where"]: f["what"] for f in answer.json()["fields"]}
    assert {"body.set.rounds", "body.set.seed"} < set(named)
    (wrong,) = everybody.post("/api/v1/cycles", json={"recipe": "smoke", "base": "/no/such"}).json()["fields"]
    assert wrong["where"] == "body.base"
    assert get(everybody, "/cycles") == before
    told = everybody.post("/api/v1/cycles/estimate", json={"recipe": "smoke", "set": {"seed": 7}})
    assert told.status_code == 200, told.text
    assert told.json()["config"]["seed"] == 7
    assert get(everybody, "/cycles") == before


def test_a_launch_is_stored_and_controlled(
    everybody: SignedIn, world: Analysed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator import workers

    monkeypatch.setattr(workers, "submit_cycle", lambda cycle_id, **_: f"flow-{cycle_id}")
    monkeypatch.setattr(workers, "cancel_flow_run", lambda *_, **__: None)
    answer = everybody.post("/api/v1/cycles", json={"recipe": "smoke", "set": {"name": "by a program", "seed": 11}})
    assert answer.status_code == 201, answer.text
    cycle = world.store.cycles.get(answer.json()["id"])
    assert (cycle.name, cycle.seed, cycle.state, cycle.created_by) == (
        "by a program",
        11,
        m.CycleState.QUEUED,
        everybody.login,
    )
    assert everybody.post(f"/api/v1/cycles/{cycle.id}/cancel").json()["state"] == "cancelled"
    refused = everybody.post(f"/api/v1/cycles/{cycle.id}/pause")
    assert refused.status_code == 409
    assert refused.json()["what"]


def test_a_launch_without_prefect_says_so(everybody: SignedIn, world: Analysed) -> None:
    answer = everybody.post("/api/v1/cycles", json={"recipe": "smoke"})
    assert answer.status_code == 503, answer.text
    where = answer.json()["where"]
    assert everybody.get(where).json()["state"] == "failed"


def test_tokens_act_within_their_scopes(app: FastAPI, world: Analysed) -> None:
    owner = person(world.store)
    secret = world.store.api_tokens.make(owner.id or 0, "reader", [Action.SEE])
    program = TestClient(app, headers={"Authorization": f"Bearer {secret}"})
    assert get(program, "/me")["may"] == ["see"]
    assert get(program, "/cycles")["items"]
    assert program.get("/api/v1/reviews").status_code == 404
    assert program.post("/api/v1/cycles", json={}).status_code == 403
    assert program.get("/api/v1/tokens").status_code == 403
    assert program.get("/trajectories.csv?limit=1").status_code == 200


def test_own_tokens_and_inbox(everybody: SignedIn) -> None:
    made = everybody.post("/api/v1/tokens", json={"name": "ci", "scopes": ["see"], "days": 7})
    assert made.status_code == 201
    assert made.json()["token"].startswith("rsi_")
    (token,) = [t for t in get(everybody, "/tokens") if t["name"] == "ci"]
    assert everybody.post(f"/api/v1/tokens/{token['id']}/revoke").json()["state"] == "revoked"
    wrong = everybody.post("/api/v1/tokens", json={"name": "", "scopes": ["fly"]}).json()
    assert {f["where"] for f in wrong["fields"]} == {"body.name", "body.scope"}
    unread = len(get(everybody, "/inbox?unread=1")["items"])
    assert everybody.post("/api/v1/inbox/read", json={}).json() == {"marked": unread}
    assert get(everybody, "/inbox?unread=1")["items"] == []


def test_people(everybody: SignedIn, world: Analysed) -> None:
    made = everybody.post("/api/v1/people", json={"login": "eve", "roles": ["analyst"]})
    assert made.status_code == 201
    assert "/sign-in/link?key=" in made.json()["link"]
    number = made.json()["person"]["id"]
    assert everybody.post("/api/v1/people", json={"login": "eve"}).status_code == 422
    assert everybody.put(f"/api/v1/people/{number}/roles", json={"roles": ["lead"]}).json()["roles"] == ["lead"]
    assert everybody.post(f"/api/v1/people/{number}/disable").json()["disabled_at"]
    told = get(everybody, "/audit-log?kind=user&object=eve")["items"]
    assert [c["action"] for c in told] == ["user.disable", "user.roles", "user.link", "user.add"]
    me = next(p["id"] for p in get(everybody, "/people")["items"] if p["login"] == everybody.login)
    assert everybody.post(f"/api/v1/people/{me}/disable").status_code == 422


def test_audits(everybody: SignedIn, world: Analysed) -> None:
    made = everybody.post("/api/v1/audits", json={"cycle": str(world.seeded.cycle.id), "phase": "joint"})
    assert made.status_code == 201, made.text
    number = made.json()["audit"]
    told = get(everybody, f"/audits/{number}")
    assert told["result"]["verdicts"] > 50
    assert get(everybody, "/audits")["items"][0]["labels"] == ["fdr", "spr"]
    wrong = everybody.post("/api/v1/audits", json={"cycle": "x", "first": "luck"})
    assert {f["where"] for f in wrong.json()["fields"]} == {"body.cycle", "body.first"}
    rows = list(csv.DictReader(io.StringIO(everybody.get(f"/audits/{number}/figures.csv").text)))
    table = pq.read_table(io.BytesIO(everybody.get(f"/audits/{number}/figures.parquet").content))
    assert len(rows) == table.num_rows == len(everybody.get(f"/audits/{number}/figures.json").json())


# ------------------------------------------------------------------------------------------------------------- exports


@pytest.mark.parametrize("path", sorted(urls.EXPORTED))
def test_every_list_page_links_its_exports(everybody: SignedIn, path: str) -> None:
    html = everybody.get(path).text
    for kind in ("csv", "json", "parquet"):
        assert f'href="{path}.{kind}"' in html
    read = everybody.get(f"{path}.json").json()
    assert len(read) == len(list(csv.DictReader(io.StringIO(everybody.get(f"{path}.csv").text))))
    assert pq.read_table(io.BytesIO(everybody.get(f"{path}.parquet").content)).to_pylist() or not read
    assert everybody.get(f"{path}.xlsx").status_code == 422


def test_an_export_holds_every_row_that_the_filters_leave(everybody: SignedIn, world: Analysed) -> None:
    query = f"cycle={world.seeded.cycle.id}&verdict=passed"
    said = everybody.get(f"/trajectories.csv?{query}")
    assert said.headers["Content-Disposition"] == 'attachment; filename="trajectories.csv"'
    rows = list(csv.DictReader(io.StringIO(said.text)))
    assert len(rows) == len(everybody.get(f"/trajectories.json?{query}").json()) > 50
    assert {r["verdict"] for r in rows} == {"passed"}
    table = pq.read_table(io.BytesIO(everybody.get(f"/trajectories.parquet?{query}").content))
    assert table.column("id").to_pylist() == [r["id"] for r in rows]
    assert str(table.schema.field("n_turns").type) == "int64"
    assert str(table.schema.field("created_at").type).startswith("timestamp")
    assert json.loads(table.column("flags")[0].as_py()) == json.loads(rows[0]["flags"])


def test_an_export_goes_on_past_one_batch(everybody: SignedIn, world: Analysed) -> None:
    for i in range(BATCH + 5):
        world.store.audit_trail.add("ada", "batch", object_kind="cycle", object_id=i)
    rows = everybody.get("/audit-log.json?action=batch").json()
    assert [int(r["object_id"]) for r in rows] == list(range(BATCH + 5))[::-1]
    assert pq.read_table(io.BytesIO(everybody.get("/audit-log.parquet?action=batch").content)).num_rows == BATCH + 5


def test_no_cell_is_a_formula(everybody: SignedIn, world: Analysed) -> None:
    for name in ("=HYPERLINK(1)", "+1", "-1", "@x", "\tx"):
        factories.cycle(world.store, name=name)
    text = everybody.get("/cycles.csv").text
    names = [r["name"] for r in csv.DictReader(io.StringIO(text))]
    assert {"'=HYPERLINK(1)", "'+1", "'-1", "'@x", "'\tx"} <= set(names)
    assert "=HYPERLINK(1)" in [r["name"] for r in everybody.get("/cycles.json").json()]


def test_exports_are_guarded_as_their_pages(app: FastAPI, world: Analysed, tmp_path: Path) -> None:
    analyst = client_as(app, m.Role.ANALYST)
    assert analyst.get("/people.csv").status_code == analyst.get("/reviews.parquet").status_code == 404
    assert analyst.get("/compare/..%2Fscores.csv").status_code == 404
    assert TestClient(app, follow_redirects=False).get("/cycles.csv").status_code == 401
