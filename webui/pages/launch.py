"""`/cycles/new`: a typed form beside its estimate and its differences from the recipe or the cycle that it started from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator.config_diff import difference
from orchestrator.costs import Prediction, predict
from orchestrator.inputs import base_folder, load_suites, model_folder, refuse_unsupported, refuse_without_servers
from orchestrator.launch import NotStarted, launch_config
from orchestrator.named_folders import named_folders, outside
from orchestrator.recipes import load_recipe, parse_config, recipe_names
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.config import CycleConfig
from stages.errors import CheckpointError, ConfigError, ModelError, RsiError, StoreError
from webui import urls
from webui.access import Action, needs, viewer_of
from webui.contexts import Choice
from webui.contexts.lead import LaunchContext
from webui.forms.launch import ADVANCED, BASE, Draft, fill, groups, start
from webui.pages.costs import cost_rows, costs_from
from webui.pages.parts import MAX_ID, QueryId, form_of, missing, queries_of, store_of
from webui.rendering import page

router = APIRouter()
MAY = [Depends(needs(Action.LAUNCH))]
SHIPPED = "shipped"
Form = Annotated[Mapping[str, str], Depends(form_of)]


@router.get("/cycles/new", response_class=HTMLResponse, dependencies=[Depends(needs(Action.LAUNCH, page=True))])
def new(request: Request, source: Annotated[QueryId, Query(alias="from")] = None, recipe: str = "") -> HTMLResponse:
    """`from`: the cycle that is cloned; else `recipe`, the demo's without one."""
    config, recipe = source_config(request, source, recipe)
    return _page(request, start(config), recipe, source, base=str(config.model) if config.model else SHIPPED)


@router.post("/cycles/new/check", response_class=HTMLResponse, dependencies=MAY)
def check(request: Request, form: Form) -> HTMLResponse:
    """The form once more, with everything that is wrong and what it would cost. Stores nothing."""
    draft, recipe, source = _draft(request, form)
    fragment = request.headers.get("HX-Request") == "true"
    checked(request, draft, suites=not fragment)  # while somebody types, no suite is generated
    return _page(request, draft, recipe, source, base=form.get(BASE, ""), checked=True)


@router.post("/cycles/new", response_class=HTMLResponse, dependencies=MAY)
def launch(request: Request, form: Form) -> Response:
    draft, recipe, source = _draft(request, form)
    checked(request, draft)
    if draft.config is None:
        return _page(request, draft, recipe, source, base=form.get(BASE, ""), checked=True, status=422)
    store, settings = store_of(request), _settings(request)
    try:
        cycle_id = launch_config(
            store, draft.config, actor=viewer_of(request).login, settings=settings, cloned_from=source
        )
    except NotStarted as error:
        cycle_id = error.cycle_id  # its page says why, and offers to resume it
    return RedirectResponse(urls.cycle(cycle_id), status_code=303)


# ------------------------------------------------------------------------------------------------------------- parts


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def source_config(request: Request, source: int | None, recipe: str) -> tuple[CycleConfig, str]:
    """The configuration that the fields start from, and its recipe's name. 404 when there is none."""
    if source is not None:
        row = queries_of(request).cycle(source)
        if row is None:
            raise missing(f"cycle {source}")
        try:
            return parse_config(row.config, f"cycle {source}"), row.recipe
        except ConfigError as error:
            raise missing(f"way to clone cycle {source}: it was launched by another version ({error})") from error
    recipe = recipe or "demo"
    if recipe not in recipe_names():
        raise missing(f"recipe {recipe!r}. There are: {', '.join(recipe_names())}")
    return load_recipe(recipe), recipe


def _draft(request: Request, form: Mapping[str, str]) -> tuple[Draft, str, int | None]:
    text = form.get("from", "")
    source = int(text) if text.isdecimal() and len(text) < 11 and 0 < int(text) <= MAX_ID else None
    config, recipe = source_config(request, source, form.get("recipe", ""))
    model, error = base_model(request, config, form.get(BASE, ""))
    draft = fill(config, form, model)
    if error:
        draft.errors[BASE], draft.config = error, None
    return draft, recipe, source


def base_model(request: Request, config: CycleConfig, base: str | None) -> tuple[str | None, str]:
    """The folder that `base` names (None: the shipped model), and why it cannot be used. No `base` keeps the configuration's."""
    model: str | None = str(config.model) if config.model else None
    if base is None or (base := base.strip()) == (model or SHIPPED):
        return model, ""
    try:
        folder = base_folder(store_of(request), base)
    except (StoreError, CheckpointError) as problem:
        return model, str(problem)
    typed = folder is not None and str(folder) == str(
        Path(base).expanduser()
    )  # else it is a checkpoint's, recorded here
    if folder is not None and typed and (why := outside(folder, _settings(request))):
        return model, why
    return (str(folder) if folder else None), ""


def checked(request: Request, draft: Draft, *, suites: bool = True) -> None:
    """What the launch itself will refuse, found beforehand and put beside its field."""
    if draft.config is None:
        return
    config = draft.config
    # What the source names was named on the machine, or was let through before.
    before = {*named_folders(draft.source), ("model", Path(draft.model or ""))}
    for name, folder in named_folders(config):
        if (name, folder) not in before and (why := outside(folder, _settings(request))):
            draft.errors[BASE if name == "model" else ADVANCED if name.endswith("review.model") else name] = why
    if draft.errors:
        draft.config = None
        return
    checks: list[tuple[str, Any]] = [
        (ADVANCED, lambda: refuse_unsupported(config)),
        ("sampler.backend", lambda: refuse_without_servers(config, _settings(request))),
        (BASE, lambda: model_folder(config)),
        (ADVANCED, lambda: predict(store_of(request), config)),
    ]
    if suites:
        checks.append(("pool", lambda: load_suites(config, _settings(request))))
    for name, act in checks:
        try:
            act()
        except (RsiError, OSError) as error:
            draft.errors[BASE if isinstance(error, ModelError) else name] = str(error)
            draft.config = None


def _page(
    request: Request,
    draft: Draft,
    recipe: str,
    source: int | None,
    *,
    base: str,
    checked: bool = False,
    status: int = 200,
) -> HTMLResponse:
    store = store_of(request)
    made = groups(draft)
    labels = {f.path: f"{g.title}: {f.label}" for g in made for f in g.fields} | {g.key: g.title for g in made}
    labels |= {BASE: "Base model", ADVANCED: "Further settings"}
    predicted = predict(store, draft.config, like=source) if draft.config else None
    before = draft.source.model_dump(mode="json", by_alias=True)
    after = draft.config.model_dump(mode="json", by_alias=True) if draft.config else draft.values
    context = LaunchContext(
        title=f"Clone of cycle {source}" if source else "New cycle",
        section="cycles",
        recipes=[Choice(value=r, label=r, href=urls.launch(recipe=r), active=r == recipe) for r in recipe_names()],
        source=f"cycle {source}" if source else f"recipe {recipe}",
        recipe=recipe,
        cloned_from=source,
        base=base,
        base_error=draft.errors.get(BASE, ""),
        bases=_bases(store),
        groups=made,
        advanced=draft.texts.get(ADVANCED, ""),
        advanced_error=draft.errors.get(ADVANCED, ""),
        problems=[(name, labels.get(name, name), text) for name, text in draft.errors.items()],
        checked=checked,
        costs=_costs(predicted),
        costs_from=costs_from(predicted.values()) if predicted else "",
        differences=difference(before, after),
    )
    return page(request, context, status=status)


def _costs(predicted: Prediction | None) -> Any:
    return cost_rows(predicted.values(), None) if predicted else ()


def _bases(store: Store) -> list[tuple[str, str]]:
    """What the field suggests: the shipped model and the newest kept checkpoints that have a folder."""
    found = [(SHIPPED, "the model that comes with the package")]
    for row in store.checkpoints.list(limit=30).items:
        if row.path and row.cycle_id:
            found.append((f"{row.cycle_id}/{row.name}", f"checkpoint {row.id} of cycle {row.cycle_id}"))
    return found
