"""The services, for real: one installation in a temporary home, brought up once for this module."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest

from orchestrator import models as m
from orchestrator import workers
from orchestrator.embedded import control, database, prefect_server, processes
from orchestrator.embedded.layout import Layout
from orchestrator.embedded.prefect_server import GPU_CYCLE
from orchestrator.embedded.state import Phase, ServiceState
from orchestrator.reconcile import reconcile, running_flows
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.workers import FlowState
from stages.errors import ConfigError, ServiceError
from tests.integration.services_kit import (
    LONG,
    OTHER_INSTALLATIONS,
    ROOT,
    STUB,
    environment,
    nothing_is_left,
    rsi,
    settings_of,
    wait,
)
from webui.pages.standing import standing


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    settings = settings_of(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # the worker's flow process imports the stub from there
        for name in OTHER_INSTALLATIONS:
            patch.delenv(name, raising=False)
        up = control.up(settings)
        try:
            assert not up.already
            assert up.published.phase is Phase.READY
            prefect_server.register(settings, (STUB,))
            yield settings
        finally:
            assert control.down(settings)
            nothing_is_left(settings)


@pytest.fixture
def store(installation: Settings) -> Iterator[Store]:
    opened = Store.open(database.url(installation), installation.artifacts)
    yield opened
    opened.close()


def running_cycle(store: Store, flow_run_id: str) -> int:
    cycle = store.cycles.create(
        m.Cycle(name="t", recipe="t", config={}, config_digest="0", seed=0, base_checkpoint="", flow_run_id=flow_run_id)
    )
    assert cycle.id is not None
    store.cycles.set_state(cycle.id, m.CycleState.RUNNING)
    return cycle.id


def start_long_flow(settings: Settings, number: int) -> psutil.Process:
    flow_run_id = workers.submit_cycle(LONG + number, settings=settings, deployment=STUB)
    wait(lambda: workers.flow_run(flow_run_id, settings=settings).state is FlowState.RUNNING)
    found = [p for p in processes.marked(settings.home) if processes.is_flow(p)]
    return next(p for p in found if p.environ()["PREFECT__FLOW_RUN_ID"] == flow_run_id)


def test_everything_answers(installation: Settings) -> None:
    published = control.look(installation)
    assert published is not None
    assert [s.name for s in published.services] == ["postgres", "prefect", "console", "worker-cpu"]
    assert {s.state for s in published.services} == {ServiceState.READY}
    assert prefect_server.healthy(installation)
    console = httpx.get(f"http://127.0.0.1:{installation.console_port}/cycles", trust_env=False)
    assert console.status_code == 303  # to the sign-in
    assert console.headers["location"].startswith("/sign-in")
    secret = installation.home / "secrets" / "prefect-auth"
    assert secret.stat().st_mode & 0o777 == 0o600
    # The Prefect server listens on loopback only, and wants the password.
    prefect = published.service("prefect")
    assert prefect is not None
    assert prefect.pid is not None
    listening = {
        c.laddr.ip for c in psutil.Process(prefect.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_second_up_and_status(installation: Settings) -> None:
    again = rsi(installation, "up")
    assert again.returncode == 0, again.stderr
    assert "Already up" in again.stdout
    told = rsi(installation, "status", "--json")
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    assert document["up"] is True
    assert all(mb > 5 for mb in document["memory_mb"].values())
    assert "worker-cpu" in rsi(installation, "status").stdout


def test_a_worker_runs_a_flow_once(installation: Settings) -> None:
    first = workers.submit_cycle(7, settings=installation, deployment=STUB)
    assert workers.submit_cycle(7, settings=installation, deployment=STUB) == first
    wait(lambda: workers.flow_run(first, settings=installation).state is FlowState.COMPLETED)
    assert "stub flow of cycle 7" in (installation.home / "logs" / "flows" / f"{first}.log").read_text()
    after = workers.submit_cycle(7, previous_flow_run_id=first, settings=installation, deployment=STUB)
    assert after != first
    wait(lambda: workers.flow_run(after, settings=installation).state is FlowState.COMPLETED)


def test_cancelling_ends_the_process(installation: Settings) -> None:
    flow = start_long_flow(installation, 1)
    flow_run_id = flow.environ()["PREFECT__FLOW_RUN_ID"]
    assert workers.cancel_flow_run(flow_run_id, wait_s=30, settings=installation).state is FlowState.CANCELLED
    wait(lambda: not processes.alive(flow), 10)


def test_flow_killed_with_its_worker_becomes_resumable(installation: Settings, store: Store) -> None:
    """Prefect would show it as Running for ever."""
    flow = start_long_flow(installation, 2)
    flow_run_id = flow.environ()["PREFECT__FLOW_RUN_ID"]
    cycle_id = running_cycle(store, flow_run_id)
    url = database.url(installation)
    assert running_flows(installation) == {flow_run_id}
    assert not reconcile(installation, url, now=time.time() + 15)

    worker = flow.parent()
    assert worker is not None
    worker.send_signal(signal.SIGKILL)
    flow.send_signal(signal.SIGKILL)
    wait(lambda: not processes.alive(flow))
    assert workers.flow_run(flow_run_id, settings=installation).state is FlowState.RUNNING
    (repair,) = reconcile(installation, url, now=time.time() + 15)
    assert repair.cycle_id == cycle_id
    cycle = store.cycles.get(cycle_id)
    assert cycle.state is m.CycleState.FAILED
    assert f"rsi cycle resume {cycle_id}" in cycle.error
    assert workers.flow_run(flow_run_id, settings=installation).state is FlowState.CRASHED
    assert not reconcile(installation, url, now=time.time() + 15)

    # The supervisor has a new worker, and it works.
    def restarted() -> bool:
        published = control.look(installation)
        status = published.service("worker-cpu") if published else None
        return status is not None and status.restarts == 1 and status.state is ServiceState.READY

    wait(restarted, 40)
    again = workers.submit_cycle(8, settings=installation, deployment=STUB)
    wait(lambda: workers.flow_run(again, settings=installation).state is FlowState.COMPLETED)


def test_gpu_classes_are_queues_with_limits_and_a_cycle_says_what_it_waits_for(
    installation: Settings, store: Store
) -> None:
    for text, limits in (("h100=2,l40s=1", {"h100": 2, "l40s": 1}), ("h100=3", {"h100": 3, "l40s": 1})):
        prefect_server.register(installation.model_copy(update={"gpu_classes": text}), (STUB,))
        with workers._client(installation) as client:
            queues = {q.name: q.concurrency_limit for q in client.read_work_queues(work_pool_name="gpu")}
        assert {name: queues[name] for name in limits} == limits
    with pytest.raises(ConfigError, match="'h100' is no NAME=CYCLES"):
        prefect_server.register(installation.model_copy(update={"gpu_classes": "h100"}), ())
    with pytest.raises(ServiceError, match=r"no GPU class 'b200'.*known: h100, l40s"):
        workers.submit_cycle(11, settings=installation, deployment=GPU_CYCLE, gpu_class="b200")

    config = {"learner": {"device": "cuda", "gpu_class": "l40s"}}
    flow_run_id = workers.submit_cycle(
        11, settings=installation, deployment=workers.deployment_of(config), gpu_class=workers.gpu_class_of(config)
    )
    with workers._client(installation) as client:
        assert client.read_flow_run(UUID(flow_run_id)).work_queue_name == "l40s"
    row = m.Cycle(
        name="t",
        recipe="t",
        config=config,
        config_digest="0",
        seed=0,
        base_checkpoint="",
        flow_run_id=flow_run_id,
    )
    cycle = store.cycles.create(row)
    try:
        for later in (5, 60, 120):
            reconcile(installation, database.url(installation), now=time.time() + later)
        (line,) = store.logs.read(cycle.id or 0)
        assert "no worker of the work pool 'gpu' for the GPU class 'l40s' is online" in line.text
        assert "rsi worker --pool gpu --gpu-class l40s" in line.text
        shown = rsi(installation, "cycle", "show", str(cycle.id)).stdout
        assert "waits: no worker" in shown
        assert line.text in standing(store, store.cycles.get(cycle.id or 0)).words
    finally:
        workers.cancel_flow_run(flow_run_id, settings=installation)
        store.cycles.set_state(cycle.id or 0, m.CycleState.CANCELLED)


@pytest.mark.full
def test_a_worker_of_the_other_pool_in_the_foreground(installation: Settings) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "worker", "--pool", "gpu", "--name", "test-gpu"]
    begun = time.time()
    worker = subprocess.Popen(command, env=environment(installation), cwd=ROOT)
    try:
        wait(lambda: prefect_server.worker_online(installation, "gpu", since=begun))
        worker.send_signal(signal.SIGINT)
        worker.wait(30)
    finally:
        worker.kill()
    unknown = rsi(installation, "worker", "--pool", "tpu")
    assert unknown.returncode == 2
    assert "cpu, gpu" in unknown.stderr


def test_the_kubernetes_pool_registers_and_its_pod_command_runs_the_flow(
    installation: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the dispatcher would put into a pod, rendered by prefect-kubernetes, run here as a plain process."""
    from prefect.states import InfrastructurePending

    pool = "pods"
    (tmp_path / f"{pool}.json").write_bytes((ROOT / "infra/kubernetes/pool/cpu.json").read_bytes())
    monkeypatch.setenv("RSI_PREFECT_JOB_TEMPLATES", str(tmp_path))
    monkeypatch.setattr(prefect_server, "POOLS", (pool,))
    deployment = replace(STUB, name="pod", pool=pool)
    for _ in range(2):
        prefect_server.register(installation, (deployment,))
    flow_run_id = workers.submit_cycle(9, settings=installation, deployment=deployment)

    container = asyncio.run(_container_of(flow_run_id, installation))
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    server = prefect_server.client_environment(installation)
    done = subprocess.run(
        [sys.executable, *container["args"][1:]],
        cwd=ROOT,
        timeout=120,
        env=environment(installation, variables | server | {"PYTHONPATH": str(ROOT)}),  # the dispatcher's own server
    )
    assert done.returncode == 0, Layout(installation.home).flow_log(flow_run_id).read_text()
    assert workers.flow_run(flow_run_id, settings=installation).state is FlowState.COMPLETED

    classes = installation.model_copy(update={"gpu_classes": "h100=1"})
    prefect_server.register(classes, (deployment,))
    flow_run_id = workers.submit_cycle(10, settings=classes, deployment=deployment, gpu_class="h100")
    with workers._client(installation) as client:
        assert client.read_flow_run(UUID(flow_run_id)).job_variables == {"gpu_class": "h100"}
        waiting = InfrastructurePending(message="no node has eight GPUs")
        client.set_flow_run_state(UUID(flow_run_id), waiting, force=True)  # as the observer of its pod would
    found = workers.flow_run(flow_run_id, settings=installation)
    assert (found.state, found.message) == (FlowState.STARTING, waiting.message)
    workers.cancel_flow_run(flow_run_id, settings=installation)

    monkeypatch.setattr(prefect_server, "POOLS", ("cpu",))  # a process pool, which has to stay one
    (tmp_path / "cpu.json").write_bytes((tmp_path / f"{pool}.json").read_bytes())
    with pytest.raises(ServiceError, match="prefect work-pool delete cpu"):
        prefect_server.register(installation, ())
    for text, complaint in (("{", "cannot be read as JSON"), ("{}", "is no base job template")):
        (tmp_path / "cpu.json").write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            prefect_server.register(installation, ())


async def _container_of(flow_run_id: str, settings: Settings) -> dict[str, Any]:
    from prefect.client.orchestration import PrefectClient
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    url, auth = prefect_server.api_url(settings), prefect_server.auth_string(settings)
    async with PrefectClient(url, auth_string=auth) as client:
        flow_run = await client.read_flow_run(UUID(flow_run_id))
        assert flow_run.deployment_id is not None
        deployment = await client.read_deployment(flow_run.deployment_id)
        pool = await client.read_work_pool(deployment.work_pool_name or "")
        assert pool.type == "kubernetes"
        configuration = await KubernetesWorkerJobConfiguration.from_template_and_values(
            pool.base_job_template, deployment.job_variables, client=client
        )
        configuration.prepare_for_flow_run(flow_run, deployment, work_pool=pool)
    (container,) = configuration.job_manifest["spec"]["template"]["spec"]["containers"]
    return dict(container)
