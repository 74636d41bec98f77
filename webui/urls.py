"""Every address of the console, built in one place."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from starlette.datastructures import QueryParams


def _query(path: str, **values: object) -> str:
    kept = {k: v for k, v in values.items() if v not in (None, "", False)}
    return f"{path}?{urlencode(kept)}" if kept else path


def sign_in() -> str:
    return "/sign-in"


def sign_out() -> str:
    return "/sign-out"


def overview() -> str:
    return "/"


def cycles(*, state: str = "", q: str = "", before: int | None = None) -> str:
    return _query("/cycles", state=state, q=q, before=before)


def cycle(cycle_id: int | None) -> str:
    return f"/cycles/{cycle_id}"


def cycle_log(cycle_id: int | None) -> str:
    return f"/cycles/{cycle_id}/log.txt"


def chart(cycle_id: int | None, name: str) -> str:
    return f"/cycles/{cycle_id}/charts/{name}.json"


def events(*, cycle: int | None = None, after: int = 0, log_after: int | None = None) -> str:
    return _query("/events", cycle=cycle, after=after, log_after=log_after)


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


def with_query(path: str, query: QueryParams, **changes: object) -> str:
    """The same page with some of its query changed; an empty value removes a key."""
    return _query(path, **{**dict(query), **changes})
