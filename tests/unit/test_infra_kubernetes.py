"""The manifests and job templates in infra/kubernetes: accepted by the schemas, in agreement with one another and with compose.

A cluster is nowhere used.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from orchestrator.embedded import prefect_server
from orchestrator.embedded.processes import FLOW_PROCESS
from stages.config import SamplerConfig
from tests.compose_file import INFRA, VERSION, compose
from tests.kubernetes_objects import INSTALLATIONS, Document, documents, one, pods

KUBERNETES = "1.33"  # the oldest that has what the workers' sandboxes need
COMPOSE: Document = compose()


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_kubernetes_accepts_every_object(name: str) -> None:
    found = [d for d in documents(name) if "apiVersion" in d]
    assert len(found) > 10
    for document in found:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    wrong = json.loads(json.dumps(next(d for d in found if d["kind"] == "Deployment")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_kubernetes_objects_refer_to_what_is_there(name: str) -> None:
    found = documents(name)
    names = {(d["kind"], d["metadata"]["name"]): d for d in found}
    assert len(names) == len(found)
    for document in found:
        claims = {c["metadata"]["name"] for c in document.get("spec", {}).get("volumeClaimTemplates", [])}
        if document["kind"] in {"Deployment", "StatefulSet"}:
            assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]
            for container in document["spec"]["template"]["spec"]["containers"]:
                volumes = {v["name"] for v in document["spec"]["template"]["spec"].get("volumes", [])} | claims
                assert {m["name"] for m in container["volumeMounts"]} <= volumes
    for pod in pods(name):
        for volume in pod["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in names
            if (config := volume.get("configMap")) and not config.get("optional"):
                assert ("ConfigMap", config["name"]) in names
            if secret := volume.get("secret"):
                assert {i["key"] for i in secret["items"]} <= set(names["Secret", secret["secretName"]]["data"])
        if account := pod.get("serviceAccountName"):
            assert ("ServiceAccount", account) in names


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_pods_have_no_privileges_and_no_passwords(name: str) -> None:
    for pod in pods(name):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod.get("serviceAccountName") == "dispatcher" or pod["automountServiceAccountToken"] is False
        sandboxes = any("procMount" in container["securityContext"] for container in pod["containers"])
        assert pod["securityContext"]["seccompProfile"]["type"] == ("Unconfined" if sandboxes else "RuntimeDefault")
        assert pod.get("hostUsers") is (False if sandboxes else None)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in pod["containers"]:
            where = f"{name}: {container['name']}"
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, where
            assert context["capabilities"] == {"drop": ["ALL"]}, where
            assert context["readOnlyRootFilesystem"] is True, where
            assert {"requests", "limits"} <= set(container["resources"]), where
            assert "readinessProbe" in container or not container.get("ports"), where
            for variable in container.get("env", []):
                plain = "PASSWORD" not in variable["name"] or variable["name"].endswith("_FILE")
                assert plain, where
                assert "valueFrom" not in variable, where
            assert all("secretRef" not in source for source in container.get("envFrom", [])), where


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("name", INSTALLATIONS)
def test_kustomize_builds_what_these_tests_read(name: str, tmp_path: Path) -> None:
    """In an overlay as the README shows it: the overlay or component, and a registry of one's own."""
    shutil.copytree(INFRA, tmp_path / "infra", ignore=shutil.ignore_patterns("secrets"))
    subprocess.run([tmp_path / "infra/secrets.sh", tmp_path / "infra/kubernetes/base/secrets"], check=True)
    overlay, *components = name.split("+")
    images = ("rsi-console", "rsi-worker-cpu", "rsi-worker-gpu")
    mine = {
        "resources": [f"../{overlay}"],
        "components": [f"../{component}" for component in components],
        "images": [{"name": image, "newName": f"registry.example/{image}"} for image in images],
    }
    (tmp_path / "infra/kubernetes/mine").mkdir()
    (tmp_path / "infra/kubernetes/mine/kustomization.yaml").write_text(yaml.safe_dump(mine))
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "infra/kubernetes/mine"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(done.stdout) if d}
    ours = {(d["kind"], d["metadata"]["name"]): d for d in documents(name)}
    assert set(built) == set(ours)
    assert built["ConfigMap", "rsi"]["data"] == ours["ConfigMap", "rsi"]["data"]
    for document in built.values():
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "rsi"
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    used = set(re.findall(r"\bimage: (\S+)", done.stdout)) - {"postgres:18"}
    assert used <= {f"registry.example/{image}:{VERSION}" for image in images}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_a_restore_is_the_backup_job_with_the_command_that_the_readme_says() -> None:
    (patch,) = re.findall(r"--type json -p '(.*?)'", (INFRA / "README.md").read_text(), re.DOTALL)
    template = one("cpu", "CronJob", "backup")["spec"]["jobTemplate"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "restore"}, **template}
    done = subprocess.run(
        ["kubectl", "patch", "--local", "-f", "-", "-o", "json", "--type", "json", "-p", patch],
        input=json.dumps(job), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    patched = json.loads(done.stdout)
    kubernetes_validate.validate(patched, KUBERNETES, strict=True)
    (container,) = patched["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["sh", "/opt/rsi/restore.sh"]
    assert "restore.sh" in one("cpu", "ConfigMap", "postgres")["data"]


# --------------------------------------------------------------------------- SGLang


def test_every_sglang_server_has_an_address_that_workers_know() -> None:
    for name in ("gpu+sglang", "pool+sglang"):
        service, servers = one(name, "Service", "sglang"), one(name, "StatefulSet", "sglang")
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True  # a paused server has to be told to go on
        assert servers["spec"]["serviceName"] == "sglang"
        urls = [f"http://sglang-{i}.sglang:30000" for i in range(servers["spec"]["replicas"])]
        assert one(name, "ConfigMap", "rsi")["data"]["RSI_SGLANG_URLS"] == ",".join(urls)
        assert service["spec"]["ports"] == [{"port": 30000}]
    assert one("gpu", "ConfigMap", "rsi")["data"]["RSI_SGLANG_URLS"] == ""


def test_sglang_servers_are_started_and_looked_after_as_in_compose() -> None:
    (container,) = one("gpu+sglang", "StatefulSet", "sglang")["spec"]["template"]["spec"]["containers"]
    model = {e["name"]: e["value"] for e in container["env"]}["SGLANG_MODEL"]
    composed = COMPOSE["services"]["sglang"]
    assert [a.replace("$(SGLANG_MODEL)", model) for a in container["args"]] == composed["command"]
    assert composed["volumes"] == ["data:/data:ro"]
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert {p["httpGet"]["path"] for p in probes} == {"/health", "/health_generate"}
    assert all(p["timeoutSeconds"] > 20 for p in probes)  # SGLang itself waits so long for a token before it says 503
    alive = container["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] > SamplerConfig().timeout_s  # of an update, paused


@pytest.mark.parametrize("name", ["gpu+sglang", "pool+sglang"])
def test_only_what_runs_cycles_reaches_sglang(name: str) -> None:
    apps = {
        d["spec"]["template"]["metadata"]["labels"]["app"]
        for d in documents(name)
        if d["kind"] != "CronJob" and "template" in d.get("spec", {})
    }
    apps |= {"cycle", "backup"}
    assert apps >= {"console", "postgres", "prefect", "sglang"}
    assert {app for app in apps if _reaches(name, app, "sglang", 30000)} == apps & {"worker-cpu", "worker-gpu", "cycle"}
    assert all(_reaches(name, app, "postgres", 5432) for app in apps)  # and the rest is as it was
    assert _reaches(name, "worker-cpu", "prefect", 4200)


def _reaches(installation: str, source: str, target: str, port: int) -> bool:
    """What a network plugin makes of the policies: selected pods take only what some policy of theirs allows."""

    def selects(selector: Document, app: str) -> bool:
        labels = {"app": app}
        rules = selector.get("matchExpressions", [])
        assert {rule["operator"] for rule in rules} <= {"In", "NotIn"}
        plain = all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())
        return plain and all((labels.get(r["key"]) in r["values"]) == (r["operator"] == "In") for r in rules)

    policies = [d["spec"] for d in documents(installation) if d["kind"] == "NetworkPolicy"]
    rules = [(p, rule) for p in policies if selects(p["podSelector"], target) for rule in p["ingress"]]
    return not rules or any(
        ("from" not in rule or any(selects(peer["podSelector"], source) for peer in rule["from"]))
        and ("ports" not in rule or {"port": port} in rule["ports"])
        for _, rule in rules
    )


# --------------------------------------------------------------------------- the Kubernetes work pool


POOLS = ("cpu", "gpu")


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> dict[str, Document]:
    """The base job template of each pool, as `rsi setup` reads it."""
    monkeypatch.setenv("RSI_PREFECT_JOB_TEMPLATES", str(INFRA / "kubernetes/pool"))
    assert {prefect_server.pool_type(pool) for pool in POOLS} == {"kubernetes"}
    found = {pool: prefect_server.job_template(pool) for pool in POOLS}
    assert all(found.values())
    return {pool: template for pool, template in found.items() if template}


def rendered(template: Document, flow_run_id: uuid.UUID, **values: Any) -> Document:
    """A flow run's job, made by prefect-kubernetes itself as its worker does it."""
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect_kubernetes.worker import KubernetesWorker

    nobody = PrefectClient("http://127.0.0.1:9/api")  # asked for nothing: the template names no blocks and no variables
    configuration = asyncio.run(
        KubernetesWorker.job_configuration.from_template_and_values(template, values, client=nobody)
    )
    configuration.prepare_for_flow_run(FlowRun(id=flow_run_id, name="cycle-7", flow_id=uuid.uuid4()))
    return dict(configuration.job_manifest)


@pytest.mark.parametrize("pool", POOLS)
def test_job_template_makes_a_pod_for_each_flow_run(pool: str, templates: dict[str, Document]) -> None:
    flow_run_id = uuid.uuid4()
    job = rendered(templates[pool], flow_run_id)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["python", "-m", FLOW_PROCESS]
    assert {"name": "PREFECT__FLOW_RUN_ID", "value": str(flow_run_id)} in container["env"]
    assert container["image"] == f"rsi-worker-{pool}:{VERSION}"
    assert job["metadata"]["namespace"] == "rsi"
    assert job["spec"]["template"]["metadata"]["labels"]["app"] == "cycle"  # the policy of SGLang's servers
    for field in ("parallelism", "completions"):  # prefect-kubernetes demands them where Kubernetes ignores them
        del job["spec"]["template"]["spec"][field]
    kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize("pool", POOLS)
def test_prefect_takes_the_job_template_and_uses_every_variable(pool: str, templates: dict[str, Document]) -> None:
    from prefect.server.schemas.actions import WorkPoolCreate

    WorkPoolCreate(name=pool, type="kubernetes", base_job_template=templates[pool])  # what its server checks
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(templates[pool]["job_configuration"])))
    assert used == set(templates[pool]["variables"]["properties"])


def test_gpu_job_asks_for_gpus_shared_memory_and_a_class(templates: dict[str, Document]) -> None:
    def spec(**values: Any) -> Document:
        job = rendered(templates["gpu"], uuid.uuid4(), **values)
        return dict(job["spec"]["template"]["spec"])

    usual = spec()
    (container,) = usual["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert usual["nodeSelector"] == {}  # without a class any node with GPUs
    chosen = spec(gpu_class="h100", gpus=2, shm_size="1Gi", tolerations=[])
    assert chosen["nodeSelector"] == {"rsi/gpu-class": "h100"}
    assert chosen["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in chosen["volumes"]
    assert chosen["tolerations"] == []


@pytest.mark.parametrize("pool", POOLS)
def test_job_template_asks_for_what_the_worker_pod_asks_for(pool: str, templates: dict[str, Document]) -> None:
    """A cycle's own pod and a process worker's pod run the same thing: they may not differ in rights and volumes."""
    job = rendered(templates[pool], uuid.uuid4())["spec"]["template"]["spec"]
    worker = one("gpu", "Deployment", f"worker-{pool}")["spec"]["template"]["spec"]
    (ours,), (theirs,) = job["containers"], worker["containers"]
    for key in (
        "securityContext", "hostUsers", "volumes", "tolerations", "automountServiceAccountToken", "enableServiceLinks",
        "terminationGracePeriodSeconds",
    ):  # fmt: skip
        assert job.get(key) == worker.get(key), key
    for key in ("securityContext", "volumeMounts", "envFrom"):
        assert ours[key] == theirs[key], key
    assert {k: {r: str(v) for r, v in of.items()} for k, of in ours["resources"].items()} == theirs["resources"]


def test_every_kubernetes_pool_has_a_dispatcher(templates: dict[str, Document]) -> None:
    containers = one("pool", "Deployment", "dispatcher")["spec"]["template"]["spec"]["containers"]
    assert {c["args"][c["args"].index("--pool") + 1] for c in containers} == set(templates)
    assert set(one("pool", "ConfigMap", "pools")["data"]) == {f"{pool}.json" for pool in templates}
    for container in containers:
        port = container["args"][container["args"].index("--health-port") + 1]
        assert container["readinessProbe"]["httpGet"]["port"] == int(port)
        variables = {e["name"]: e["value"] for e in container["env"]}
        assert variables["PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_NAME"] == "rsi"


def test_dispatcher_may_do_what_its_worker_does() -> None:
    (role,) = [d for d in documents("pool") if d["kind"] == "Role"]
    may = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert may >= {("jobs", v) for v in ("create", "delete", "get", "list", "watch")}
    assert may >= {("pods", "list"), ("pods", "watch"), ("pods/log", "get")}
    assert not [resource for resource, _ in may if resource == "secrets"]
