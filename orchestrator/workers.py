"""Flow runs: launched, looked at, cancelled; and the worker command.

The only place outside `flows`, `gate` and `embedded` that talks to Prefect. State of a cycle lives in our tables; a flow
run is only the process that works on it.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx

from orchestrator.embedded import control, database, prefect_server, services
from orchestrator.embedded.gpu_classes import require_class
from orchestrator.embedded.prefect_server import CYCLE, GPU_CYCLE, Deployment
from orchestrator.settings import Settings, get_settings
from stages.errors import ServiceError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun as PrefectFlowRun

CANCEL_WAIT_S = 60.0
WORKER_SILENCE_S = 90.0  # a worker beats every 30 s


class FlowState(StrEnum):
    """Prefect's state types, and two of ours."""

    SCHEDULED = "scheduled"  # waits for a worker
    PENDING = "pending"  # a worker has taken it and starts its process
    STARTING = "starting"  # a cluster has its pod and no place or image for it yet; however long that takes
    RUNNING = "running"
    PAUSED = "paused"  # suspended at a gate; no process
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"
    CRASHED = "crashed"  # its process ended without a word
    MISSING = "missing"  # the Prefect server does not know it

    @property
    def ended(self) -> bool:
        """No process works on it, and none will."""
        return self in {
            FlowState.CANCELLED,
            FlowState.COMPLETED,
            FlowState.FAILED,
            FlowState.CRASHED,
            FlowState.MISSING,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRun:
    id: str
    state: FlowState
    since: float = 0.0  # Unix time of the state, s
    message: str = ""


def submit_cycle(
    cycle_id: int,
    *,
    previous_flow_run_id: str | None = None,
    settings: Settings | None = None,
    deployment: Deployment = CYCLE,
    gpu_class: str = "",
) -> str:
    """Ask Prefect to run a cycle's flow on a worker; returns the flow run's id (0.1 s; the process starts in 2-5 s).

    `previous_flow_run_id` is the cycle's last one (None the first time): asking twice with the same one gives the same
    flow run, so that a double click or a repeated request starts one process.

    Raises:
        ServiceError: no Prefect server answers, or it lacks the deployment or the GPU class.
    """
    key = f"{deployment.full_name}/{cycle_id}/after-{previous_flow_run_id or 'nothing'}"
    with _client(settings) as client:
        found = client.read_deployment_by_name(deployment.full_name)
        if gpu_class:
            require_class(client, gpu_class)
        pods = gpu_class and client.read_work_pool(deployment.pool).type == "kubernetes"
        flow_run = client.create_flow_run_from_deployment(
            found.id,
            parameters={"cycle_id": cycle_id},
            name=f"cycle-{cycle_id}",
            idempotency_key=key,
            work_queue_name=gpu_class or None,
            job_variables={"gpu_class": gpu_class} if pods else None,  # the pod's node
        )
    return str(flow_run.id)


def deployment_of(config: Mapping[str, Any]) -> Deployment:
    """Where a stored cycle's process runs: on the pool `gpu` when its learner computes on GPUs, else on `cpu`."""
    return GPU_CYCLE if config.get("learner", {}).get("device") == "cuda" else CYCLE


def gpu_class_of(config: Mapping[str, Any]) -> str:
    """The GPU class that a stored cycle asks for; empty: any."""
    return str(config.get("learner", {}).get("gpu_class", "")) if deployment_of(config).pool == "gpu" else ""


def why_waiting(config: Mapping[str, Any], *, settings: Settings, now: float) -> str:
    """What a stored cycle whose flow run no worker has taken waits for, at the Unix time `now`."""
    pool, gpu_class = deployment_of(config).pool, gpu_class_of(config)
    option = f" --gpu-class {gpu_class}" if gpu_class else ""
    whose = f"the work pool {pool!r}" + (f" for the GPU class {gpu_class!r}" if gpu_class else "")
    since = now - WORKER_SILENCE_S
    online = (
        prefect_server.queue_polled(settings, pool, gpu_class, since=since)
        if gpu_class
        else prefect_server.worker_online(settings, pool, since=since)
    )
    if online:
        return f"waits for a free place: the workers of {whose} have as many cycles as they may"
    return f"waits: no worker of {whose} is online; start one with `rsi worker --pool {pool}{option}`"


def flow_runs(ids: Sequence[str], *, settings: Settings | None = None) -> dict[str, FlowRun]:
    """State of each flow run; one that the server does not know is MISSING.

    Raises:
        ServiceError: no Prefect server answers.
    """
    found = {flow_run_id: FlowRun(id=flow_run_id, state=FlowState.MISSING) for flow_run_id in ids}
    with _client(settings) as client:
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

        for start in range(0, len(ids), 200):
            wanted = FlowRunFilterId(any_=[UUID(i) for i in ids[start : start + 200]])
            for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(id=wanted)):
                found[str(run.id)] = _read(run)
    return found


def flow_run(flow_run_id: str, *, settings: Settings | None = None) -> FlowRun:
    """As `flow_runs`, for one."""
    return flow_runs([flow_run_id], settings=settings)[flow_run_id]


def cancel_flow_run(flow_run_id: str, *, wait_s: float = 0.0, settings: Settings | None = None) -> FlowRun:
    """Ask the worker to end a flow run's process; waits up to `wait_s` until it has. Nothing happens to an ended one.

    A run that no worker has taken yet is cancelled at once. If no worker lives, the run stays `cancelling` and the
    reconciler settles it.
    """
    with _client(settings) as client:
        from prefect.states import Cancelled, Cancelling

        now = _state_of(client, flow_run_id)
        if now.state.ended:
            return now
        waiting = now.state in {FlowState.SCHEDULED, FlowState.PAUSED}
        client.set_flow_run_state(UUID(flow_run_id), Cancelled() if waiting else Cancelling())
        until = time.monotonic() + wait_s
        now = _state_of(client, flow_run_id)
        while not now.state.ended and time.monotonic() < until:
            time.sleep(0.2)
            now = _state_of(client, flow_run_id)
    return now


def mark_crashed(flow_run_id: str, message: str, *, settings: Settings | None = None) -> None:
    """Tell Prefect that a flow run's process is gone; Prefect itself would never find out."""
    with _client(settings) as client:
        from prefect.states import Crashed

        client.set_flow_run_state(UUID(flow_run_id), Crashed(message=message), force=True)


def run_worker(
    pool: str,
    *,
    name: str | None = None,
    gpu_class: str = "",
    health_port: int | None = None,
    settings: Settings | None = None,
) -> None:
    """Become a worker of `pool`: replaces this process, so that signals reach the worker itself. Does not return.

    With a `health_port` it answers `/health` there on every address.

    Raises:
        ServiceError: unknown pool, no Prefect server, no database, or a Kubernetes pool without the package for it.
    """
    if pool not in prefect_server.POOLS:
        raise ServiceError(f"There is no work pool {pool!r}. Choose one of {', '.join(prefect_server.POOLS)}.")
    if gpu_class and pool != "gpu":
        raise ServiceError(f"The pool {pool!r} has no GPU classes. Use --pool gpu, or leave --gpu-class out.")
    settings = control.running_settings(settings or get_settings())
    database_url = database.url(settings)
    if not prefect_server.healthy(settings):
        raise ServiceError(_no_server(settings))
    if prefect_server.pool_type(pool) == "kubernetes" and find_spec("prefect_kubernetes") is None:
        raise ServiceError(
            "A worker of a Kubernetes pool needs the extra `kubernetes`: pip install 'terminal-rsi[kubernetes]'."
        )
    environment = services.common(settings, database_url) | prefect_server.client_environment(settings)
    if health_port:
        environment |= {"PREFECT_WORKER_WEBSERVER_HOST": "0.0.0.0", "PREFECT_WORKER_WEBSERVER_PORT": str(health_port)}
    command = services.worker_command(pool, name, health=health_port is not None, gpu_class=gpu_class)
    services.default_signals()
    os.execve(command[0], command, {**os.environ, **environment})


# --------------------------------------------------------------------------- client


@contextmanager
def _client(settings: Settings | None) -> "Iterator[SyncPrefectClient]":
    settings = control.running_settings(settings or get_settings())
    prefect_server.load_prefect(settings)
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.exceptions import ObjectNotFound, PrefectException

    url, auth = prefect_server.api_url(settings), prefect_server.auth_string(settings)
    try:
        with SyncPrefectClient(url, auth_string=auth or None) as client:
            yield client
    except ObjectNotFound as error:
        raise ServiceError(
            f"The Prefect server at {url} lacks what was asked for: {error}. `rsi up` registers our deployments."
        ) from error
    except httpx.TransportError as error:
        raise ServiceError(f"{_no_server(settings)} ({type(error).__name__}: {error})") from error
    except RuntimeError as error:
        if "reach API" not in str(error):
            raise
        raise ServiceError(_no_server(settings)) from error  # what Prefect's client makes of a refused connection
    except (httpx.HTTPStatusError, PrefectException) as error:
        raise ServiceError(f"The Prefect server at {url} refused a request: {error}") from error


def _no_server(settings: Settings) -> str:
    return f"No Prefect server answers at {prefect_server.api_url(settings)}. Start it with `rsi up`."


def _state_of(client: "SyncPrefectClient", flow_run_id: str) -> FlowRun:
    from prefect.exceptions import ObjectNotFound

    try:
        return _read(client.read_flow_run(UUID(flow_run_id)))
    except ObjectNotFound:
        return FlowRun(id=flow_run_id, state=FlowState.MISSING)


def _read(run: "PrefectFlowRun") -> FlowRun:
    if run.state is None:
        return FlowRun(id=str(run.id), state=FlowState.SCHEDULED)
    starting = run.state.name == "InfrastructurePending"  # what the observer of Kubernetes pods calls a Pending pod
    return FlowRun(
        id=str(run.id),
        state=FlowState.STARTING if starting else FlowState(run.state.type.value.lower()),
        since=run.state.timestamp.timestamp(),
        message=run.state.message or "",
    )
