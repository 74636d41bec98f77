"""infra/kubernetes as Kustomize reads it: every object of an overlay, alone or with a component, and the pods in them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.compose_file import INFRA

INSTALLATIONS = ("cpu", "gpu", "pool", "gpu+sglang", "pool+sglang")  # an overlay, and the component

Document = dict[str, Any]


@cache
def documents(installation: str) -> tuple[Document, ...]:
    """Every object that a kustomization names or generates, those of its bases and components included."""
    found: tuple[Document, ...] = ()
    for name in installation.split("+"):
        found = _with(found, INFRA / "kubernetes" / name)
    return found


def _with(found: tuple[Document, ...], folder: Path) -> tuple[Document, ...]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in kustomization.get("resources", []):
        path = (folder / name).resolve()
        found = _with(found, path) if path.is_dir() else (*found, *filter(None, yaml.safe_load_all(path.read_text())))
    for kind, key in (("ConfigMap", "configMapGenerator"), ("Secret", "secretGenerator")):
        for generated in kustomization.get(key, []):
            data = dict(literal.split("=", 1) for literal in generated.get("literals", []))
            data |= {Path(name).name: "" for name in generated.get("files", [])}
            if generated.get("behavior") == "merge":
                (before,) = (d for d in found if (d["kind"], d["metadata"]["name"]) == (kind, generated["name"]))
                found, data = tuple(d for d in found if d is not before), before["data"] | data
            found += ({"kind": kind, "metadata": {"name": generated["name"]}, "data": data},)
    return found


def one(installation: str, kind: str, name: str) -> Document:
    (found,) = (d for d in documents(installation) if (d["kind"], d["metadata"]["name"]) == (kind, name))
    return found


def pods(installation: str) -> list[Document]:
    def specs(node: Any) -> list[Document]:
        if isinstance(node, dict):
            own = [node] if "containers" in node else []
            return own + [s for value in node.values() for s in specs(value)]
        return [s for value in node for s in specs(value)] if isinstance(node, list) else []

    return [spec for document in documents(installation) for spec in specs(document)]
