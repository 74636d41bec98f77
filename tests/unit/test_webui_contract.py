"""What pages promise without a store: templates get what their contexts declare, vendored files are what VERSIONS says."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules

import plotly.offline
import pytest
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

from webui import contexts
from webui.rendering import STATIC, environment

MODULES = [contexts, *(import_module(f"webui.contexts.{m.name}") for m in iter_modules(contexts.__path__))]
CONTEXTS = sorted(
    {c for m in MODULES for c in vars(m).values() if isinstance(c, type) and "template" in vars(c)},
    key=lambda c: c.__name__,
)


def imported(tree: nodes.Template) -> set[str]:
    """Macros of other files and of this one, which its blocks see."""
    names = {i.target for i in tree.find_all(nodes.Import)} | {d.name for d in tree.find_all(nodes.Macro)}
    listed = [n for i in tree.find_all(nodes.FromImport) for n in i.names]
    return names | {n if isinstance(n, str) else n[1] for n in listed}


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda c: c.__name__)
def test_a_page_gets_what_its_context_declares(context: type[contexts.PageContext]) -> None:
    """Template and dataclass name the same things: nothing undeclared, nothing unused."""
    env = environment()
    declared = {f.name for f in fields(context)}
    used: set[str] = set()
    name: str | None = context.template
    while name:
        assert env.loader is not None
        tree = env.parse(env.loader.get_source(env, name)[0])
        used |= find_undeclared_variables(tree) - imported(tree)
        parent = tree.find(nodes.Extends)
        name = parent.template.as_const() if parent else None
    assert used - set(env.globals) - {"viewer", "exports"} <= declared
    assert declared <= used


def test_vendored_files_are_what_versions_says() -> None:
    listed = json.loads((STATIC / "vendor" / "VERSIONS.json").read_text(encoding="utf-8"))["files"]
    for file in listed:
        content = (STATIC / "vendor" / file["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file["sha256"], file["file"]
    scripts = {p.name for p in (STATIC / "vendor").glob("*.js")}
    assert scripts == {f["file"] for f in listed}
    by_package = {f["package"]: f["version"] for f in listed}
    assert by_package["plotly.js-cartesian-dist-min"] == plotly.offline.get_plotlyjs_version()
    assert by_package["htmx.org"].startswith("4.")
    assert f"plotly.js-cartesian-dist-min {by_package['plotly.js-cartesian-dist-min']}" in (
        STATIC / "vendor" / "plotly.css"
    ).read_text(encoding="utf-8")
