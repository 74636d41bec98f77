"""`/cycles/{id}/config`: every setting of a cycle, only what differs from its recipe and from what it was cloned from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import tomli_w
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, Response

from orchestrator import models as m
from orchestrator.config_diff import Difference, difference
from orchestrator.recipes import load_recipe, parse_config, recipe_names
from stages.errors import ConfigError
from webui import urls
from webui.access import Action, needs
from webui.contexts import Choice
from webui.contexts.lead import ConfigContext
from webui.pages.parts import RowId, missing, queries_of, store_of
from webui.pages.standing import tabs
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
FORMATS = ("toml", "json")


@router.get("/cycles/{cycle_id:int}/config", response_class=HTMLResponse)
def config(request: Request, cycle_id: RowId, format: Literal["toml", "json"] = "toml") -> HTMLResponse:
    store = store_of(request)
    row = _cycle(request, cycle_id)
    values = _ordered(row)
    text, exact = _text(values, format)
    parent = queries_of(request).cycle(row.cloned_from_id) if row.cloned_from_id else None
    context = ConfigContext(
        title=f"Configuration of cycle {cycle_id}",
        section="cycles",
        cycle=row,
        tabs=tabs(cycle_id, store.stages.of_cycle(cycle_id), "config"),
        formats=[
            Choice(value=f, label=f.upper(), href=urls.cycle_config(cycle_id, format=f), active=f == format)
            for f in FORMATS
        ],
        text=text,
        note="" if exact else "TOML has no word for a setting that was taken away: the JSON is exact.",
        against_recipe=_against_recipe(row, values),
        against_parent=difference(parent.config, values) if parent else None,
    )
    return page(request, context)


@router.get("/cycles/{cycle_id:int}/config.{format}", include_in_schema=False)
def download(request: Request, cycle_id: RowId, format: Literal["toml", "json"]) -> Response:
    """What `rsi cycle launch FILE` takes (TOML), or the stored values (JSON)."""
    text, _ = _text(_ordered(_cycle(request, cycle_id)), format)
    headers = {"Content-Disposition": f'attachment; filename="cycle-{cycle_id}.{format}"'}
    kind = "application/json" if format == "json" else "application/toml; charset=utf-8"
    return Response(text, media_type=kind, headers=headers)


def _cycle(request: Request, cycle_id: int) -> m.Cycle:
    row = queries_of(request).cycle(cycle_id)
    if row is None:
        raise missing(f"cycle {cycle_id}")
    return row


def _ordered(row: m.Cycle) -> Mapping[str, Any]:
    """The stored values in the order of the settings: the database keeps none."""
    try:
        config = parse_config(row.config, f"cycle {row.id}")
    except ConfigError:  # of another version of this program: shown as it is
        return row.config
    dumped = config.model_dump(mode="json", by_alias=True)
    return dumped if dumped == row.config else row.config


def _against_recipe(row: m.Cycle, values: Mapping[str, Any]) -> list[Difference] | None:
    if row.recipe not in recipe_names():
        return None
    recipe = load_recipe(row.recipe, name=row.name).model_dump(mode="json", by_alias=True)
    return difference(recipe, values)


def _text(values: Mapping[str, Any], format: str) -> tuple[str, bool]:
    """The text, and whether it gives the same configuration again."""
    if format == "json":
        return json.dumps(values, indent=2, ensure_ascii=False), True
    kept = _without_nothing(values)
    try:
        exact = parse_config(kept, "").model_dump(mode="json", by_alias=True) == values
    except ConfigError:
        exact = False
    return tomli_w.dumps(kept), exact


def _without_nothing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_nothing(v) for k, v in value.items() if v is not None}
    return [_without_nothing(v) for v in value] if isinstance(value, list) else value
