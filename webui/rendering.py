"""From a page's context to a response: the whole page, or the one block that htmx asks for.

A fragment is a block of its page's template, named like the element that it fills (`id="strip"` is `{% block strip %}`);
the same address without `HX-Request` gives the page.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from webui import formats, rail, urls
from webui.access import Action, viewer_of
from webui.contexts import PageContext

HERE = Path(__file__).parent
STATIC = HERE / "static"


class Entry(NamedTuple):
    """One line of the left rail, shown to those who may."""

    section: str
    label: str
    href: str
    action: Action = Action.SEE


RAIL = (
    ("overview", "Overview", urls.overview()),
    ("inbox", "Inbox", urls.inbox(), Action.OWN_TOKENS),
    ("cycles", "Cycles", urls.cycles()),
    ("checkpoints", "Checkpoints", urls.checkpoints()),
    ("lineage", "Lineage", urls.lineage()),
    ("compare", "Compare", urls.compare()),
    ("experiments", "Experiments", urls.experiments()),
    ("reviews", "Reviews", urls.reviews(mine=1), Action.SEE_REVIEWS),
    ("trajectories", "Trajectories", urls.trajectories()),
    ("audits", "Audits", urls.audits()),
    ("suspicious", "Suspicious", urls.suspicious()),
    ("people", "People", urls.people(), Action.SEE_PEOPLE),
    ("audit-log", "Audit log", urls.audit_log(), Action.SEE_AUDIT_LOG),
)
FILTERS = (
    formats.percent,
    formats.points,
    formats.interval,
    formats.signed,
    formats.number,
    formats.tokens,
    formats.duration,
    formats.when,
    formats.iso,
    formats.age,
    formats.digest,
    formats.setting,
    formats.visible,
)
# The words of states with the sign that stands before them: never colour alone. Signs that text fonts have: no emoji.
STATE_ICONS = {
    "pending": "○",
    "queued": "○",
    "running": "▶",
    "resuming": "▷",
    "pausing": "‖",
    "paused": "‖",
    "suspended": "◐",
    "cancelling": "✕",
    "cancelled": "✕",
    "failed": "⚠",
    "done": "✓",
    "planned": "○",
    "stopped": "‖",
    "skipped": "–",
    "passed": "✓",
    "not_run": "–",
    "verifier_error": "⚠",
    "infra_error": "⚠",
    "none": "–",
    "delivered": "✓",
    "given_up": "⚠",
    "waiting": "○",
    "written": "○",
    "approved": "✓",
    "approve": "✓",
    "consumed": "✓",
    "rejected": "✕",
    "reject": "✕",
    "superseded": "–",
}


@lru_cache(maxsize=1)
def environment() -> Environment:
    env = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=formats.shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {f.__name__: f for f in FILTERS}
    env.globals |= {
        "urls": urls,
        "static": static_url,
        "rail": [Entry(*entry) for entry in RAIL],
        "icons": STATE_ICONS,
        "between": formats.between,
    }
    env.globals["ui"] = env.get_template("macros.html").module  # `ui.score(…)`, in blocks as in pages
    return env


@lru_cache(maxsize=64)
def static_url(name: str) -> str:
    """Address of a static file with a hash of its content, so that it may be cached for ever."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"


def variables(request: Request, context: PageContext) -> dict[str, Any]:
    """The fields of a context, not its nested values, who looks (`viewer`, for `{{ ui.csrf(viewer) }}` and rights), a
    list's files (`exports`)."""
    viewer = viewer_of(request)
    if context.section and not _wanted_block(request):  # an error page stands without the database
        viewer = replace(viewer, counts=rail.counts(request, viewer))
    told = {"viewer": viewer, "exports": urls.exports(request.url.path, request.query_params)}
    return {f.name: getattr(context, f.name) for f in fields(context)} | told


def page(request: Request, context: PageContext, *, status: int = 200) -> HTMLResponse:
    """The page; for htmx the block that is named like its target. An unknown target gets the whole page."""
    template = environment().get_template(context.template)
    block = _wanted_block(request)
    if block and block in template.blocks:
        html = "".join(template.blocks[block](template.new_context(variables(request, context))))
    else:
        html = template.render(variables(request, context))
    return HTMLResponse(
        html, status_code=status, headers={"Vary": "HX-Request, HX-Target", "Cache-Control": "private, no-cache"}
    )


def _wanted_block(request: Request) -> str:
    """htmx 4 names the target as `tag#id`."""
    if request.headers.get("HX-Request") != "true":
        return ""
    return request.headers.get("HX-Target", "").partition("#")[2].replace("-", "_")


def fragment(template: str, block: str, **values: Any) -> str:
    """One block of a template with its own values (log lines that are pushed)."""
    loaded = environment().get_template(template)
    return "".join(loaded.blocks[block](loaded.new_context(values)))
