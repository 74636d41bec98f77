"""The files in infra/ agree with one another and with the program. What needs Docker or a cluster is not tested here."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from orchestrator.cli import app
from orchestrator.embedded.prefect_server import PrefectSettings
from orchestrator.settings import Settings

INFRA = Path(__file__).resolve().parents[2] / "infra"
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
KUSTOMIZE = sorted(INFRA.glob("kubernetes/*/kustomization.yaml"))


def documents(folder: Path) -> list[dict[str, Any]]:
    """Every object that a kustomization names, those of its bases included."""
    found: list[dict[str, Any]] = []
    for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        if (folder / name).is_dir():
            found += documents(folder / name)
        else:
            found += [d for d in yaml.safe_load_all((folder / name).read_text()) if d]
    return found


def pods(folder: Path) -> list[dict[str, Any]]:
    def specs(node: Any) -> list[dict[str, Any]]:
        if isinstance(node, dict):
            own = [node] if "containers" in node else []
            return own + [s for value in node.values() for s in specs(value)]
        return [s for value in node for s in specs(value)] if isinstance(node, list) else []

    return [spec for document in documents(folder) for spec in specs(document)]


def commands() -> list[list[str]]:
    found = [s["command"] for s in COMPOSE["services"].values() if isinstance(s.get("command"), list)]
    found += [
        c["args"] for folder in KUSTOMIZE for pod in pods(folder.parent) for c in pod["containers"] if "args" in c
    ]
    for path in INFRA.glob("images/*.Dockerfile"):
        found += [
            yaml.safe_load(line.removeprefix("CMD "))
            for line in path.read_text().splitlines()
            if line.startswith("CMD [")
        ]
    return [command for command in found if command[0] == "rsi"]


def test_every_command_and_option_exists() -> None:
    assert len(commands()) >= 9
    for _, name, *arguments in commands():
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {a for a in arguments if a.startswith("--")} <= options, name


def test_every_variable_is_one_that_we_read() -> None:
    known = {"DATABASE_URL"} | {f"RSI_{name}".upper() for name in Settings.model_fields}
    known |= {f"RSI_PREFECT_{name}".upper() for name in PrefectSettings.model_fields}
    text = "\n".join(path.read_text() for path in INFRA.rglob("*") if path.is_file() and path.name != "README.md")
    named = set(re.findall(r"\bRSI_[A-Z_]+[A-Z]\b", text))
    assert named - known <= {"RSI_CONSOLE_BIND"}  # compose's own
    assert "RSI_PREFECT_API_URL" in named


def test_compose_refers_to_what_is_there() -> None:
    for name, service in COMPOSE["services"].items():
        if build := service.get("build"):
            assert (INFRA / build["context"] / build["dockerfile"]).is_file()
        for dependency in service.get("depends_on", {}):
            assert dependency in COMPOSE["services"]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (INFRA / source).exists(), f"{name}: {volume}"
        if service.get("depends_on", {}).get("postgres") or service.get("depends_on", {}).get("prefect"):
            for other in ("postgres", "prefect"):
                assert COMPOSE["services"][other]["healthcheck"]


@pytest.mark.parametrize("path", KUSTOMIZE, ids=lambda p: p.parent.name)
def test_kubernetes_objects_refer_to_what_is_there(path: Path) -> None:
    found = documents(path.parent)
    names = [(d["kind"], d["metadata"]["name"]) for d in found]
    assert len(names) == len(set(names))
    assert all("apiVersion" in d for d in found)
    claims = {name for kind, name in names if kind == "PersistentVolumeClaim"}
    for pod in pods(path.parent):
        volumes = {v["name"]: v for v in pod.get("volumes", [])} | {"postgres": {}}  # of the StatefulSet's template
        for volume in volumes.values():
            assert "persistentVolumeClaim" not in volume or volume["persistentVolumeClaim"]["claimName"] in claims
        for container in pod["containers"]:
            assert {m["name"] for m in container.get("volumeMounts", [])} <= set(volumes)
    for document in found:
        if document["kind"] in {"Deployment", "StatefulSet"}:
            assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]


def test_dockerfiles_take_a_base_image_and_do_not_run_as_root() -> None:
    files = list(INFRA.glob("images/*.Dockerfile"))
    assert {f.stem for f in files} == {"console", "worker-cpu", "worker-gpu"}
    for path in files:
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert lines[0].startswith("ARG BASE_IMAGE=")
        assert lines[1] == "FROM ${BASE_IMAGE}"
        assert [line for line in lines if line.startswith("USER ")][-1] == "USER rsi"
        copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
        missing = [name for name in copied if not (INFRA.parent / name).exists()]
        assert set(missing) <= {"README.md"}, missing
