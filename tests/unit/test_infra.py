"""The files in infra/ agree with one another and with the program, and are what Docker, compose and Kubernetes accept.

Images are built and started in `tests/integration/test_images.py`; a cluster is nowhere used.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sysconfig
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from typer.main import get_command

from orchestrator.cli import app
from orchestrator.embedded import prefect_server
from orchestrator.embedded.prefect_server import PrefectSettings
from orchestrator.embedded.processes import FLOW_PROCESS
from orchestrator.settings import Settings
from tests.compose_file import INFRA, compose, example_env

OVERLAYS = ("cpu", "gpu", "pool")
KUBERNETES = "1.33"  # the oldest that has what the workers' sandboxes need

Document = dict[str, Any]
COMPOSE: Document = compose()


@cache
def documents(folder: Path) -> tuple[Document, ...]:
    """Every object that a kustomization names or generates, those of its bases included."""
    found: list[Document] = []
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in kustomization.get("resources", []):
        path = (folder / name).resolve()
        found += documents(path) if path.is_dir() else [d for d in yaml.safe_load_all(path.read_text()) if d]
    for kind, key in (("ConfigMap", "configMapGenerator"), ("Secret", "secretGenerator")):
        for generated in kustomization.get(key, []):
            keys = [name.split("=")[0] for name in generated.get("literals", [])]
            keys += [Path(name).name for name in generated.get("files", [])]
            found.append({"kind": kind, "metadata": {"name": generated["name"]}, "data": dict.fromkeys(keys, "")})
    return tuple(found)


def pods(folder: Path) -> list[Document]:
    def specs(node: Any) -> list[Document]:
        if isinstance(node, dict):
            own = [node] if "containers" in node else []
            return own + [s for value in node.values() for s in specs(value)]
        return [s for value in node for s in specs(value)] if isinstance(node, list) else []

    return [spec for document in documents(folder) for spec in specs(document)]


def commands() -> list[list[str]]:
    found = [s["command"] for s in COMPOSE["services"].values() if isinstance(s.get("command"), list)]
    found += [
        c["args"]
        for name in OVERLAYS
        for pod in pods(INFRA / "kubernetes" / name)
        for c in pod["containers"]
        if "args" in c
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
    known |= {"RSI_PREFECT_AUTH_FILE"}  # the images' entrypoint
    text = "\n".join(path.read_text() for path in INFRA.rglob("*") if path.is_file())
    named = set(re.findall(r"\bRSI_[A-Z_]+[A-Z]\b", text))
    assert named - known <= {"RSI_CONSOLE_BIND"}  # compose's own
    assert named >= {
        "RSI_PREFECT_API_URL", "RSI_CONSOLE_URL", "RSI_ANONYMOUS_ROLES", "RSI_OIDC_ISSUER", "RSI_OIDC_CLIENT_SECRET_FILE",
        "RSI_WEBHOOK_URL",
    }  # fmt: skip


# --------------------------------------------------------------------------- compose


def test_compose_is_what_the_compose_specification_allows() -> None:
    PyCompose.from_json(json.dumps(COMPOSE))
    wrong = json.loads(json.dumps(COMPOSE))
    wrong["services"]["console"]["helthcheck"] = {}
    with pytest.raises(ValueError, match="helthcheck"):
        PyCompose.from_json(json.dumps(wrong))


def test_compose_refers_to_what_is_there() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        if build := service.get("build"):
            dockerfile = (INFRA / build["context"] / build["dockerfile"]).read_text()
            assert "target" not in build or f"AS {build['target']}\n" in dockerfile
        for dependency, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert services[dependency]["healthcheck"]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (INFRA / source).exists(), f"{name}: {volume}"
        secrets = {
            Path(v).name for k, v in service.get("environment", {}).items() if str(v).startswith("/run/secrets/")
        }
        assert secrets == set(service.get("secrets", [])) <= set(COMPOSE["secrets"]), name


def test_no_password_stands_in_compose_or_its_environment(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    for _ in range(2):  # what is there stays
        subprocess.run([INFRA / "secrets.sh", folder], check=True)
        found = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(found) == set(COMPOSE["secrets"])
    assert found["postgres_password"] in found["database_url"]
    assert len(found["postgres_password"]) == 48
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not [name for name in example_env() if "PASSWORD" in name or "AUTH" in name]


# --------------------------------------------------------------------------- kubernetes


@pytest.mark.parametrize("name", OVERLAYS)
def test_kubernetes_accepts_every_object(name: str) -> None:
    found = [d for d in documents(INFRA / "kubernetes" / name) if "apiVersion" in d]
    assert len(found) > 10
    for document in found:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    wrong = json.loads(json.dumps(next(d for d in found if d["kind"] == "Deployment")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_kubernetes_objects_refer_to_what_is_there(name: str) -> None:
    found = documents(INFRA / "kubernetes" / name)
    names = {(d["kind"], d["metadata"]["name"]): d for d in found}
    assert len(names) == len(found)
    for document in found:
        claims = {c["metadata"]["name"] for c in document.get("spec", {}).get("volumeClaimTemplates", [])}
        if document["kind"] in {"Deployment", "StatefulSet"}:
            assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]
            for container in document["spec"]["template"]["spec"]["containers"]:
                volumes = {v["name"] for v in document["spec"]["template"]["spec"].get("volumes", [])} | claims
                assert {m["name"] for m in container["volumeMounts"]} <= volumes
    for pod in pods(INFRA / "kubernetes" / name):
        for volume in pod["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in names
            if (config := volume.get("configMap")) and not config.get("optional"):
                assert ("ConfigMap", config["name"]) in names
            if secret := volume.get("secret"):
                assert {i["key"] for i in secret["items"]} <= set(names["Secret", secret["secretName"]]["data"])
        if account := pod.get("serviceAccountName"):
            assert ("ServiceAccount", account) in names


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_have_no_privileges_and_no_passwords(name: str) -> None:
    for pod in pods(INFRA / "kubernetes" / name):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod.get("serviceAccountName") == "dispatcher" or pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            where = f"{name}: {container['name']}"
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, where
            assert context["capabilities"] == {"drop": ["ALL"]}, where
            assert context.get("readOnlyRootFilesystem") or container["image"] == "postgres:18", where
            assert {"requests", "limits"} <= set(container["resources"]), where
            assert "readinessProbe" in container or not container.get("ports"), where
            for variable in container.get("env", []):
                plain = "PASSWORD" not in variable["name"] or variable["name"].endswith("_FILE")
                assert plain, where
                assert "valueFrom" not in variable, where
            assert all("secretRef" not in source for source in container.get("envFrom", [])), where


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_builds_what_these_tests_read(name: str, tmp_path: Path) -> None:
    shutil.copytree(INFRA, tmp_path / "infra")
    subprocess.run([tmp_path / "infra/secrets.sh", tmp_path / "infra/kubernetes/base/secrets"], check=True)
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "infra/kubernetes" / name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = [d for d in yaml.safe_load_all(done.stdout) if d]
    ours = documents(INFRA / "kubernetes" / name)
    assert {(d["kind"], d["metadata"]["name"]) for d in built} == {(d["kind"], d["metadata"]["name"]) for d in ours}
    assert all(d["kind"] == "Namespace" or d["metadata"]["namespace"] == "rsi" for d in built)
    for document in built:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


# --------------------------------------------------------------------------- the Kubernetes work pool


def test_job_template_makes_a_pod_for_each_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendered by prefect-kubernetes itself, as its worker does it for a flow run."""
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect_kubernetes.worker import KubernetesWorker

    monkeypatch.setenv("RSI_PREFECT_JOB_TEMPLATES", str(INFRA / "kubernetes/pool"))
    assert prefect_server.pool_type("cpu") == "kubernetes"
    assert prefect_server.pool_type("gpu") == "process"
    template = prefect_server.job_template("cpu")
    assert template is not None
    nobody = PrefectClient("http://127.0.0.1:9/api")  # asked for nothing: the template names no blocks and no variables
    configuration = asyncio.run(
        KubernetesWorker.job_configuration.from_template_and_values(template, {}, client=nobody)
    )
    flow_run = FlowRun(id=uuid.uuid4(), name="cycle-7", flow_id=uuid.uuid4())
    configuration.prepare_for_flow_run(flow_run)
    job = configuration.job_manifest
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["python", "-m", FLOW_PROCESS]
    assert {"name": "PREFECT__FLOW_RUN_ID", "value": str(flow_run.id)} in container["env"]
    assert job["metadata"]["namespace"] == "rsi"
    for field in ("parallelism", "completions"):  # prefect-kubernetes demands them where Kubernetes ignores them
        del job["spec"]["template"]["spec"][field]
    kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_job_template_asks_for_what_the_worker_pod_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle's own pod and a process worker's pod run the same thing: they may not differ in rights and volumes."""
    monkeypatch.setenv("RSI_PREFECT_JOB_TEMPLATES", str(INFRA / "kubernetes/pool"))
    template = prefect_server.job_template("cpu")
    assert template is not None
    ours = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    (worker,) = [
        d["spec"]["template"]["spec"]
        for d in documents(INFRA / "kubernetes/cpu")
        if d["metadata"]["name"] == "worker-cpu"
    ]
    for key in ("securityContext", "hostUsers", "volumes", "automountServiceAccountToken", "enableServiceLinks"):
        assert ours[key] == worker[key], key
    for key in ("securityContext", "volumeMounts", "envFrom"):
        assert ours["containers"][0][key] == worker["containers"][0][key], key


def test_dispatcher_may_do_what_its_worker_does() -> None:
    (role,) = [d for d in documents(INFRA / "kubernetes/pool") if d["kind"] == "Role"]
    may = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert may >= {("jobs", v) for v in ("create", "delete", "get", "list", "watch")}
    assert may >= {("pods", "list"), ("pods", "watch"), ("pods/log", "get")}
    assert not [resource for resource, _ in may if resource == "secrets"]


# --------------------------------------------------------------------------- images


def test_dockerfiles_pass_hadolint() -> None:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    files = sorted(INFRA.glob("images/*.Dockerfile"))
    assert {f.name.removesuffix(".Dockerfile") for f in files} == {"cpu", "worker-gpu"}
    done = subprocess.run([program, "--no-color", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dockerfiles_copy_what_is_there_and_do_not_run_as_root() -> None:
    kept = {
        line.removeprefix("!") for line in (INFRA.parent / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    for path in INFRA.glob("images/*.Dockerfile"):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert lines[0].startswith("ARG BASE_IMAGE=")
        assert [line for line in lines if line.startswith("USER ")][-1] == "USER 10001"
        copied = [n for line in lines if line.startswith("COPY ") and "--from" not in line for n in line.split()[1:-1]]
        assert all((INFRA.parent / name).exists() for name in copied)
        assert all(any(name == k or name.startswith(f"{k}/") for k in kept) for name in copied)


def test_entrypoint_reads_secrets_from_files(tmp_path: Path) -> None:
    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [INFRA / "images/entrypoint.sh", "sh", "-c", 'echo "$DATABASE_URL|${RSI_WEBHOOK_SECRET:-}|$RSI_WEBHOOK_SECRET_FILE"'],
            env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    secret = tmp_path / "url"
    secret.write_text("postgresql://a b$c'd\"@h/x\n")
    done = run(DATABASE_URL_FILE=str(secret), RSI_WEBHOOK_SECRET_FILE="secrets/webhook")
    assert done.stdout == "postgresql://a b$c'd\"@h/x||secrets/webhook\n"
    refused = run(DATABASE_URL_FILE=str(tmp_path / "none"))
    assert refused.returncode == 2
    assert "DATABASE_URL_FILE names" in refused.stderr
