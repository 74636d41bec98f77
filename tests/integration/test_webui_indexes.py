"""No page and no list of the API reads a large table without an index: every statement that they issue, explained.

Sequential scans are switched off, so one that is still there has no index to use; nor may an index be read from end to end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from orchestrator import models as m
from orchestrator.store import Store
from tests.console_people import client_as
from tests.console_world import SIGN_IN, Everything, examples, seed_everything
from webui import urls
from webui.api.reference import document

SMALL = {  # tables that stay short, and why
    "users": "people of one laboratory",
    "suite": "versions of a few suites",
    "experiment": "specifications that people write",
    "reference_row": "published figures",
    "webhook": "addresses from the settings",
}


@pytest.fixture(scope="module")
def world(module_store: Store, module_folder: Path) -> Everything:
    return seed_everything(module_store, module_folder)


def addresses(world: Everything) -> list[str]:
    """Every page, the filters of the lists, and every list of the API."""
    pages = [a for route, found in examples(world).items() if route not in SIGN_IN for a in found]
    cycle, stage = world.analysed.seeded.cycle.id, world.analysed.seeded.stages[2].id
    filters = (
        *(f"cycle={cycle}", f"stage={stage}", f"stage={stage}&phase=joint&step=1", "suite=heldout-names", "task=x"),
        *(
            "family=family-1",
            "family=family-1&stratum=easy&verdict=passed",
            "verdict=passed",
            "stratum=easy",
            "end=done",
        ),
        *("gate=1", "flagged=1", "costly=1", f"cycle={cycle}&costly=1", "checkpoint=1", "runbook=x", "before=9"),
    )
    lists = [
        *(f"/trajectories?{f}" for f in filters),
        *(f"/cycles?{f}" for f in ("state=live", "state=done", "q=demo", "before=3")),
        *(f"/checkpoints?{f}" for f in (f"cycle={cycle}", "candidates=1", "before=3")),
        *(
            f"/reviews?{f}"
            for f in ("mine=1", "claimed=1", "state=rejected", f"cycle={cycle}", f"stage={stage}", "task=x")
        ),
        *(f"/audit-log?{f}" for f in ("actor=ada", "action=sign-in", "kind=cycle&object=1", "before=3")),
        *(f"/suspicious?cycle={cycle}", f"/audits?cycle={cycle}", "/inbox?unread=1", "/lineage?checkpoint=3"),
        *(f"{path}.csv" for path in urls.EXPORTED),
    ]
    api = [path for path, methods in document()["paths"].items() if "get" in methods and "{" not in path]
    return [*pages, *lists, *api, f"/api/v1/evaluations?cycle={cycle}", "/api/v1/evaluations?suite=heldout-names"]


def test_every_statement_has_an_index(world: Everything) -> None:
    issued: dict[str, tuple[Any, str]] = {}  # statement -> its values and the address that issued it first
    here = [""]

    def note(_c: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "WITH")):
            issued.setdefault(statement, (values, here[0]))

    client = client_as(world.store, login=world.login)
    event.listen(world.store.engine, "before_cursor_execute", note)
    try:
        for address in addresses(world):
            here[0] = address
            answer = client.get(address)
            assert answer.status_code in (200, 404, 422), (address, answer.status_code)
    finally:
        event.remove(world.store.engine, "before_cursor_execute", note)
    assert len(issued) > 100
    wrong = []
    with world.store.engine.connect() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        for statement, (values, address) in issued.items():
            told = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", values).scalar_one()
            plan = (json.loads(told) if isinstance(told, str) else told)[0]["Plan"]
            wrong += [f"{address}: {what}: {' '.join(statement.split())[:400]}" for what in unindexed(plan)]
    assert not wrong, "\n".join(wrong)


def unindexed(plan: Mapping[str, Any], limited: bool = False) -> Iterator[str]:
    """What a plan reads whole: tables, and indexes from end to end without a LIMIT above."""
    table, kind = plan.get("Relation Name", ""), plan["Node Type"]
    if table in m.metadata.tables and table not in SMALL:
        if kind == "Seq Scan":
            yield f"Seq Scan on {table}"
        whole = kind in ("Index Scan", "Index Only Scan") and "Index Cond" not in plan
        if whole and not limited and not partial(plan["Index Name"]):
            yield f"{kind} of all of {plan['Index Name']}"
    for part in plan.get("Plans", ()):
        yield from unindexed(part, limited or kind == "Limit")


def partial(index: str) -> bool:
    """An index that holds only the rows that are looked for."""
    found = next((i for t in m.metadata.tables.values() for i in t.indexes if i.name == index), None)
    return found is not None and found.dialect_options["postgresql"]["where"] is not None


def test_the_check_notices_a_table_without_an_index(world: Everything) -> None:
    with world.store.engine.connect() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        for query in (
            "SELECT * FROM log_line WHERE text = 'x'",
            "SELECT id FROM trajectory WHERE n_turns = 3 ORDER BY seq",
        ):
            (told,) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {query}").scalar_one()
            assert list(unindexed(told["Plan"])), query
