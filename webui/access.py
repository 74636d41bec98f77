"""Who may do what: the one table of permissions, and the dependency that every guarded address names.

A page that the viewer may not see is 404, an action 403 (see `needs`). Who the viewer is, is decided once per request
in `webui.sign_in`, which leaves it in `request.state.viewer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fastapi import HTTPException, Request

from orchestrator.models import Role


class Action(StrEnum):
    """What a viewer may want. `see.` actions are pages; the others change something."""

    SEE = "see"  # cycles, checkpoints, lineage, trajectories, comparisons, audits
    SEE_REVIEWS = "see.reviews"  # the queue and runbooks with their findings
    SEE_HIDDEN = "see.hidden"  # hidden tests and reference solutions; every look is logged
    SEE_PEOPLE = "see.people"
    SEE_AUDIT_LOG = "see.audit-log"
    LAUNCH = "cycle.launch"
    CONTROL = "cycle.control"  # pause, resume, cancel
    DECIDE = "runbook.decide"  # approve, reject, undo, claim
    REVISE = "runbook.revise"  # an edit, which makes a new revision
    ASSIGN = "runbook.assign"
    AUDIT = "audit.run"
    MEASURE = "evaluation.run"
    IMPORT = "trials.import"
    MANAGE_PEOPLE = "people.manage"
    OWN_TOKENS = "token.own"  # one's own API tokens, preferences and inbox


LEAD, REVIEWER, ANALYST, ADMIN = Role.LEAD, Role.REVIEWER, Role.ANALYST, Role.ADMIN
EVERYBODY = frozenset(Role)
ALLOWED: dict[Action, frozenset[Role]] = {
    Action.SEE: EVERYBODY,
    Action.SEE_REVIEWS: frozenset({LEAD, REVIEWER, ADMIN}),
    Action.SEE_HIDDEN: frozenset({REVIEWER}),
    Action.SEE_PEOPLE: frozenset({ADMIN}),
    Action.SEE_AUDIT_LOG: frozenset({LEAD, ADMIN}),
    Action.LAUNCH: frozenset({LEAD}),
    Action.CONTROL: frozenset({LEAD}),
    Action.DECIDE: frozenset({REVIEWER}),
    Action.REVISE: frozenset({REVIEWER}),
    Action.ASSIGN: frozenset({LEAD, REVIEWER}),
    Action.AUDIT: frozenset({LEAD, ANALYST}),
    Action.MEASURE: frozenset({LEAD, ANALYST}),
    Action.IMPORT: frozenset({LEAD, ANALYST}),
    Action.MANAGE_PEOPLE: frozenset({ADMIN}),
    Action.OWN_TOKENS: EVERYBODY,
}
ANONYMOUS = frozenset({Action.SEE, Action.SEE_REVIEWS})
"""The most that anybody may do without signing in, whatever roles RSI_ANONYMOUS_ROLES gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Who asks. Nobody (`login` empty) has no roles."""

    login: str = ""
    name: str = ""
    user_id: int | None = None
    roles: frozenset[Role] = frozenset()
    csrf: str = ""  # what a form of this sign-in must send back
    scope: frozenset[Action] | None = None  # an API token's; None: all that the roles allow
    counts: Mapping[str, str] = field(
        default_factory=dict
    )  # section of the rail -> how much waits there for this person

    def may(self, action: Action | str) -> bool:
        wanted = Action(action)
        return (self.scope is None or wanted in self.scope) and not self.roles.isdisjoint(ALLOWED[wanted])

    @property
    def blind(self) -> bool:
        """What reviewers decided is told only after the own verdict: to who reviews, whatever a token may, and to who is
        not signed in, which a reviewer can be."""
        return self.user_id is None or Role.REVIEWER in self.roles


SCOPES: dict[Action, str] = {
    Action.SEE: "read cycles, checkpoints, trajectories, comparisons and audits",
    Action.SEE_REVIEWS: "read the review queue and runbooks",
    Action.SEE_HIDDEN: "read hidden tests and reference solutions (logged)",
    Action.SEE_PEOPLE: "read who may sign in",
    Action.SEE_AUDIT_LOG: "read the audit log",
    Action.LAUNCH: "launch cycles",
    Action.CONTROL: "pause, resume and cancel cycles",
    Action.DECIDE: "approve and reject runbooks, under your name",
    Action.REVISE: "edit runbooks",
    Action.ASSIGN: "assign reviews",
    Action.AUDIT: "run reward audits",
    Action.MEASURE: "run evaluations",
    Action.IMPORT: "import trials",
    Action.OWN_TOKENS: "read your inbox and set your preferences",
}
"""What an API token may be given. Not people and their roles: those need a person who signed in."""

NOBODY = Viewer()


def viewer_of(request: Request) -> Viewer:
    return getattr(request.state, "viewer", NOBODY)


def needs(action: Action, *, page: bool = False) -> Callable[[Request], Viewer]:
    """A dependency: the viewer, when they may. Raises 404 for a page and 403 for an action that they may not.

    `page`: the page of an action, such as its form.
    """

    def check(request: Request) -> Viewer:
        viewer = viewer_of(request)
        if viewer.may(action):
            return viewer
        if page or action.value.split(".")[0] == "see":
            raise HTTPException(404)
        raise HTTPException(403, f"Your roles do not allow this ({action}). Ask an administrator")

    check.action = action  # type: ignore[attr-defined]  # so that a test can list what guards what
    return check


def in_person(request: Request) -> Viewer:
    """A dependency: somebody who is signed in on a browser. Raises 404 for nobody, 403 for an API token."""
    viewer = viewer_of(request)
    if not viewer.login:
        raise HTTPException(404)
    if viewer.scope is not None:
        raise HTTPException(403, "An API token cannot do this. Sign in with a browser")
    return viewer


in_person.action = Action.OWN_TOKENS  # type: ignore[attr-defined]
