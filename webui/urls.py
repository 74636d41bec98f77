"""Every address of the console, built in one place."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote, urlencode

from starlette.datastructures import QueryParams


def _query(path: str, **values: object) -> str:
    kept = {k: v for k, v in values.items() if v not in (None, "", False)}
    return f"{path}?{urlencode(kept)}" if kept else path


def sign_in() -> str:
    return "/sign-in"


def sign_in_link() -> str:
    return "/sign-in/link"


def sign_in_oidc(*, following: str = "") -> str:
    return _query("/sign-in/oidc", next=following)


def sign_out() -> str:
    return "/sign-out"


def account(*, done: str = "") -> str:
    return _query("/account", done=done)


def account_password() -> str:
    return "/account/password"


def account_sign_outs() -> str:
    return "/account/sign-outs"


def tokens() -> str:
    return "/tokens"


def token_revoke(token_id: int | None) -> str:
    return f"/tokens/{token_id}/revoke"


def people() -> str:
    return "/people"


def person(user_id: int | None, change: str) -> str:
    return f"/people/{user_id}/{change}"


def audit_log(**filters: object) -> str:
    return _query("/audit-log", **filters)


def overview() -> str:
    return "/"


def cycles(*, state: str = "", q: str = "", before: int | None = None) -> str:
    return _query("/cycles", state=state, q=q, before=before)


def cycle(cycle_id: int | None) -> str:
    return f"/cycles/{cycle_id}"


def cycle_log(cycle_id: int | None) -> str:
    return f"/cycles/{cycle_id}/log.txt"


def launch(*, source: int | None = None, recipe: str = "") -> str:
    return _query("/cycles/new", **{"from": source, "recipe": recipe})


def launch_check() -> str:
    return "/cycles/new/check"


def cycle_act(cycle_id: int | None, verb: str) -> str:
    """Where pause, resume and cancel are sent; for cancel also the page that asks first."""
    return f"/cycles/{cycle_id}/{verb}"


def cycle_logs(cycle_id: int | None, **filters: object) -> str:
    return _query(f"/cycles/{cycle_id}/logs", **filters)


def cycle_config(cycle_id: int | None, **view: object) -> str:
    return _query(f"/cycles/{cycle_id}/config", **view)


def cycle_config_file(cycle_id: int | None, kind: str) -> str:
    return f"/cycles/{cycle_id}/config.{kind}"


def stage(cycle_id: int | None, name: str, **view: object) -> str:
    return _query(f"/cycles/{cycle_id}/stages/{quote(name.lower(), safe='')}", **view)


def stage_chart(cycle_id: int | None, name: str, chart: str, **view: object) -> str:
    return _query(f"/cycles/{cycle_id}/stages/{quote(name.lower(), safe='')}/charts/{chart}.json", **view)


def inbox(*, unread: bool = False, before: int | None = None) -> str:
    return _query("/inbox", unread=1 if unread else None, before=before)


def inbox_read() -> str:
    return "/inbox/read"


def chart(cycle_id: int | None, name: str) -> str:
    return f"/cycles/{cycle_id}/charts/{name}.json"


def events(*, cycle: int | None = None, after: int = 0, log_after: int | None = None, **log: object) -> str:
    return _query("/events", cycle=cycle, after=after, log_after=log_after, **log)


def checkpoints(*, cycle: int | None = None, candidates: bool = False, before: int | None = None) -> str:
    return _query("/checkpoints", cycle=cycle, candidates=1 if candidates else None, before=before)


def checkpoint(checkpoint_id: int | None) -> str:
    return f"/checkpoints/{checkpoint_id}"


def lineage(*, cycle: int | None = None, checkpoint: int | None = None) -> str:
    return _query("/lineage", cycle=cycle, checkpoint=checkpoint)


def trajectories(**filters: object) -> str:
    return _query("/trajectories", **filters)


def trajectory(trajectory_id: str, *, turn: int | None = None, first: int = 0, q: str = "") -> str:
    path = _query(f"/trajectories/{quote(trajectory_id, safe='')}", first=first or None, q=q)
    return path if turn is None else f"{path}#t{turn}"


def compare(ids: Sequence[int | None] = (), *, data: str = "", **view: object) -> str:
    """The comparison, or with `data` one of its files (`scores.csv`, `chart.json`)."""
    path = _query(f"/compare/{data}" if data else "/compare", c=",".join(str(i) for i in ids), **view)
    return path.replace("%2C", ",")


def task(pool: str, task_id: str, *, checkpoint: int | None = None) -> str:
    path = f"/tasks/{quote(pool, safe='')}/{quote(task_id)}"
    return f"{path}?checkpoint={checkpoint}#c{checkpoint}" if checkpoint else path


def token_view(trajectory_id: str, *, turn: int = 0, by: str = "") -> str:
    return _query(f"/trajectories/{quote(trajectory_id, safe='')}/tokens", turn=str(turn), by=by)


def experiments(*, before: int | None = None) -> str:
    return _query("/experiments", before=before)


def experiment(experiment_id: int | None) -> str:
    return f"/experiments/{experiment_id}"


def experiment_file(experiment_id: int | None, kind: str) -> str:
    return f"/experiments/{experiment_id}/report.{kind}"


def audits(*, cycle: int | None = None, before: int | None = None) -> str:
    return _query("/audits", cycle=cycle, before=before)


def audit(audit_id: int | None, data: str = "") -> str:
    """The audit, or with `data` one of its files (`figures.csv`, `chart.json`)."""
    return f"/audits/{audit_id}/{data}" if data else f"/audits/{audit_id}"


def audit_job(number: int | None, do: str = "") -> str:
    return f"/audits/jobs/{number}/{do}" if do else f"/audits/jobs/{number}"


def audit_new(**values: object) -> str:
    return _query("/audits/new", **values)


def suspicious(*, cycle: int | None = None, before: int | None = None) -> str:
    return _query("/suspicious", cycle=cycle, before=before)


def cycle_analysis(cycle_id: int | None, data: str = "") -> str:
    return f"/cycles/{cycle_id}/analysis" + (f"/{data}" if data else "")


def reviews(**filters: object) -> str:
    return _query("/reviews", **filters)


def review(runbook_id: str, action: str = "", **view: object) -> str:
    """A runbook under review, or with `action` the address of one of its forms."""
    path = f"/reviews/{quote(runbook_id, safe='')}"
    return _query(f"{path}/{action}" if action else path, **view)


EXPORTED = frozenset(  # lists with `.csv`, `.json` and `.parquet` twins (`webui.api.listing`)
    f"/{name}"
    for name in (
        *("cycles", "checkpoints", "trajectories", "suspicious", "reviews", "audits"),
        *("experiments", "people", "audit-log", "inbox"),
    )
)
_PLACE = {"before", "after", "last", "costly"}  # where in a list one is, not what it holds


def exports(path: str, query: QueryParams) -> list[tuple[str, str]]:
    """(words, address) of the files with every row of a list page; none for other pages."""
    if path not in EXPORTED:
        return []
    kept = {k: v for k, v in query.items() if k not in _PLACE}
    return [(words, _query(f"{path}.{words.lower()}", **kept)) for words in ("CSV", "JSON", "Parquet")]


def api() -> str:
    return "/api/v1"


def with_query(path: str, query: QueryParams, **changes: object) -> str:
    """The same page with some of its query changed; an empty value removes a key."""
    return _query(path, **{**dict(query), **changes})
