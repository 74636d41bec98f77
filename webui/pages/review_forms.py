"""The forms of `/reviews/{id}`: verdicts, undo, edits, claims, comments. Each works without a script."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response

from orchestrator import review_look, reviewing, revising
from orchestrator.store import Store
from stages.domain import Decision
from stages.errors import ConfigError, StoreError, TaskError
from webui import urls
from webui.access import Action, Viewer, needs
from webui.pages.parts import missing, store_of
from webui.pages.review import Typed, show
from webui.pages.reviews import Decide, number_of
from webui.sign_in import local_path

router = APIRouter(prefix="/reviews/{runbook_id}")
Back = Annotated[str, Form(max_length=2000)]
Words = Annotated[str, Form(max_length=10_000)]


@router.post("/decide")
async def decide(request: Request, runbook_id: str, viewer: Decide) -> Response:
    """Approve or reject, and go on to the next. Fields: decision, revision, reason, number, seen…, dismiss-<id>."""
    form = await request.form()
    return await run_in_threadpool(_decide, request, runbook_id, viewer, [(k, str(v)) for k, v in form.multi_items()])


def _decide(request: Request, runbook_id: str, viewer: Viewer, fields: list[tuple[str, str]]) -> Response:
    store, form = known(request, runbook_id), dict(fields)
    dismissals = {
        int(k.removeprefix("dismiss-")): v[:2000]
        for k, v in fields
        if k.startswith("dismiss-") and _is_id(k.removeprefix("dismiss-"))
    }
    reason, number = form.get("reason", "")[:10_000], number_of(form.get("number", ""))
    following = _following(store, viewer, runbook_id)
    try:
        if form.get("decision") not in {d.value for d in Decision}:
            raise reviewing.ReviewRefused("choose to approve or to reject", "decision")
        reviewing.decide(
            store,
            runbook_id,
            viewer.login,
            Decision(form["decision"]),
            reason=reason,
            number=number,
            dismissals=dismissals,
            seen=[int(v) for k, v in fields if k == "seen" and _is_id(v)],
            revision=number_of(form.get("revision", "")),
            settings=request.app.state.settings,
        )
    except ConfigError as error:
        place = error.field if isinstance(error, reviewing.ReviewRefused) else ""
        typed = Typed(errors={place or "decision": str(error)}, reason=reason, number=number, dismissals=dismissals)
        return show(request, runbook_id, viewer, typed=typed, status=422)
    return RedirectResponse(following, 303)


@router.post("/undo")
def undo(request: Request, runbook_id: str, viewer: Decide) -> Response:
    store = known(request, runbook_id)
    try:
        reviewing.undo(store, runbook_id, viewer.login)
    except ConfigError as error:
        return show(request, runbook_id, viewer, typed=Typed(errors={"decision": str(error)}), status=422)
    return RedirectResponse(urls.review(runbook_id), 303)


@router.post("/revise")
def revise(
    request: Request,
    runbook_id: str,
    viewer: Annotated[Viewer, Depends(needs(Action.REVISE))],
    revision: Annotated[int, Form(ge=1)],
    text: Annotated[str, Form(max_length=200_000)] = "",
) -> Response:
    """A new revision; the rules look at it before the answer comes."""
    store = known(request, runbook_id)
    try:
        revising.revise(
            store,
            runbook_id,
            viewer.login,
            revising.from_text(text),
            revision=revision,
            settings=request.app.state.settings,
        )
    except (ConfigError, TaskError, StoreError) as error:
        return show(request, runbook_id, viewer, typed=Typed(errors={"text": str(error)}, edit_text=text), status=422)
    return RedirectResponse(urls.review(runbook_id), 303)


@router.post("/skip")
def skip(request: Request, runbook_id: str, viewer: Decide) -> Response:
    store = known(request, runbook_id)
    following = _following(store, viewer, runbook_id, decided=False)
    reviewing.skip(store, runbook_id, viewer.login)
    return RedirectResponse(following, 303)


@router.post("/claim")
def claim(request: Request, runbook_id: str, viewer: Decide, back: Back = "") -> Response:
    store = known(request, runbook_id)
    try:
        reviewing.claim(store, runbook_id, viewer.login)
    except ConfigError as error:
        return show(request, runbook_id, viewer, typed=Typed(errors={"claim": str(error)}), status=422)
    return RedirectResponse(_back(back, runbook_id), 303)


@router.post("/release")
def release(
    request: Request,
    runbook_id: str,
    viewer: Annotated[Viewer, Depends(needs(Action.ASSIGN))],
    login: Annotated[str, Form(max_length=100)] = "",
    back: Back = "",
) -> Response:
    """The own claim, or with `login` an assignment that the viewer made."""
    try:
        reviewing.release(known(request, runbook_id), runbook_id, login or viewer.login, by=viewer.login)
    except ConfigError as error:
        return show(request, runbook_id, viewer, typed=Typed(errors={"claim": str(error)}), status=422)
    return RedirectResponse(_back(back, runbook_id), 303)


@router.post("/assign")
def assign(
    request: Request,
    runbook_id: str,
    viewer: Annotated[Viewer, Depends(needs(Action.ASSIGN))],
    assignee: Annotated[str, Form(max_length=100)] = "",
    back: Back = "",
) -> Response:
    try:
        reviewing.assign(known(request, runbook_id), runbook_id, assignee, by=viewer.login)
    except ConfigError as error:
        return show(request, runbook_id, viewer, typed=Typed(errors={"assignee": str(error)}), status=422)
    return RedirectResponse(_back(back, runbook_id), 303)


@router.post("/comment")
def comment(request: Request, runbook_id: str, viewer: Decide, text: Words = "") -> Response:
    try:
        reviewing.comment(known(request, runbook_id), runbook_id, viewer.login, text)
    except ConfigError as error:
        return show(request, runbook_id, viewer, typed=Typed(errors={"comment": str(error)}), status=422)
    return RedirectResponse(f"{urls.review(runbook_id)}#comments", 303)


def known(request: Request, runbook_id: str) -> Store:
    """The store; 404 for a runbook that it does not have."""
    store = store_of(request)
    try:
        store.runbooks.get(runbook_id)
    except StoreError as error:
        raise missing(f"runbook {runbook_id[:60]}") from error
    return store


def _following(store: Store, viewer: Viewer, runbook_id: str, *, decided: bool = True) -> str:
    """Where to go from here: what comes next in the queue, else its beginning, else the queue itself."""
    queue = review_look.queue_of(store, viewer.login)
    at = queue.index(runbook_id) if runbook_id in queue else -1
    others = [*queue[at + 1 :], *queue[: max(at, 0)]]
    last = runbook_id if decided else None
    return urls.review(others[0], last=last) if others else urls.reviews(mine=1, last=last)


def _is_id(text: str) -> bool:
    """Of a finding."""
    return text.isdecimal() and len(text) < 19


def _back(back: str, runbook_id: str) -> str:
    return local_path(back) if back else urls.review(runbook_id)
