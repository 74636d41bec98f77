"""The Prefect server: its environment, its database, and what we register with it.

One server replica on loopback, with a database of its own on the same Postgres, silent towards the outside
(no analytics, no second user interface that loads a remote page), behind a generated password.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import psycopg
from psycopg import sql
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url

from orchestrator.embedded.gpu_classes import ensure_queues
from orchestrator.embedded.layout import Layout
from orchestrator.embedded.processes import FLOW_PROCESS
from orchestrator.settings import Settings
from stages.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

DATABASE = "prefect"
POOLS = ("cpu", "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A flow that a worker can start. `entrypoint` is an importable `module.function`: no source folder, no git."""

    flow: str
    name: str
    entrypoint: str
    pool: str

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"


CYCLE = Deployment(flow="run-cycle", name="cycle", entrypoint="orchestrator.flows.run_cycle_flow", pool="cpu")
GPU_CYCLE = Deployment(flow="run-cycle", name="cycle-gpu", entrypoint=CYCLE.entrypoint, pool="gpu")
DEPLOYMENTS = (CYCLE, GPU_CYCLE)


class PrefectSettings(BaseSettings):
    """`RSI_PREFECT_API_URL` and `RSI_PREFECT_AUTH` name a Prefect server of your own; then none is started here."""

    model_config = SettingsConfigDict(env_prefix="RSI_PREFECT_", extra="ignore", frozen=True)

    api_url: str = ""  # http://host:4200/api
    auth: str = ""  # user:password; empty: the generated secret of the embedded server
    worker_query_seconds: float = 2.0  # how often a worker asks for work
    job_templates: Path | None = None  # folder; pool P is a Kubernetes pool when P.json is there, its base job template


def external() -> bool:
    """True when somebody else runs the Prefect server."""
    return bool(PrefectSettings().api_url)


def api_url(settings: Settings) -> str:
    return PrefectSettings().api_url or f"http://127.0.0.1:{settings.prefect_port}/api"


def auth_string(settings: Settings) -> str:
    """`user:password`; empty when an external server has none."""
    prefect = PrefectSettings()
    return prefect.auth if prefect.api_url else Layout(settings.home).auth()


def client_environment(settings: Settings) -> dict[str, str]:
    """Variables for every process that talks to the server (worker, flow process, console)."""
    variables = {
        **_home_environment(settings),
        "PREFECT_API_URL": api_url(settings),
        "PREFECT_WORKER_QUERY_SECONDS": f"{PrefectSettings().worker_query_seconds:g}",
    }
    if auth := auth_string(settings):
        variables["PREFECT_API_AUTH_STRING"] = auth
    return variables


def _home_environment(settings: Settings) -> dict[str, str]:
    home = Layout(settings.home).prefect_home
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),  # never a person's own profile
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def load_prefect(settings: Settings) -> None:
    """Import Prefect, which reads its home and profile from the environment then, and only then; leave no trace there."""
    if "prefect" in sys.modules:
        return
    added = {name: value for name, value in _home_environment(settings).items() if name not in os.environ}
    os.environ.update(added)
    try:
        import prefect.client.orchestration  # noqa: F401
    finally:
        for name in added:
            os.environ.pop(name, None)


def server_environment(settings: Settings, database_url: str) -> dict[str, str]:
    """Variables of the server process. `database_url` is any Postgres URL; its database name is replaced."""
    return {
        **client_environment(settings),
        "PREFECT_SERVER_API_AUTH_STRING": auth_string(settings),
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(settings.prefect_port),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": async_url(database_url, DATABASE),
        "PREFECT_SERVER_UI_V2_ENABLED": "false",
        # Nothing here has a schedule, and our own reconciler repairs; each of these would poll the database all day.
        "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    }


def server_command() -> tuple[str, ...]:
    return (sys.executable, "-m", "prefect", "server", "start")


def async_url(url: str, database: str) -> str:
    """The same server through asyncpg, another database. libpq's `sslmode` is `ssl` in asyncpg."""
    parsed = make_url(url).set(drivername="postgresql+asyncpg", database=database)
    query = dict(parsed.query)
    if mode := query.pop("sslmode", None):
        query["ssl"] = mode
    return parsed.set(query=query).render_as_string(hide_password=False)


def ensure_database(url: str) -> None:
    """Create the server's database on the Postgres of `url` unless it is there.

    Raises:
        ServiceError: the account may not create databases.
    """
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        with psycopg.connect(plain, autocommit=True, connect_timeout=10) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                return
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
    except psycopg.errors.DuplicateDatabase:
        return
    except psycopg.Error as error:
        raise ServiceError(
            f"Cannot create the database {DATABASE!r} for the Prefect server: {error}. Create it by hand with an "
            "account that may, or run Prefect yourself and set RSI_PREFECT_API_URL."
        ) from error


# --------------------------------------------------------------------------- talking to a running server


@lru_cache(maxsize=4)
def _http(url: str, auth: str) -> httpx.Client:
    user, _, password = auth.partition(":")
    return httpx.Client(base_url=url, auth=(user, password) if auth else None, timeout=10, trust_env=False)


def healthy(settings: Settings, *, timeout_s: float = 3.0) -> bool:
    """The server answers and accepts our password."""
    try:
        answer = _http(api_url(settings), auth_string(settings)).get("/admin/version", timeout=timeout_s)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


def worker_online(settings: Settings, pool: str, *, since: float) -> bool:
    """A worker of `pool` has sent a heartbeat after `since` (Unix time, s)."""
    client = _http(api_url(settings), auth_string(settings))
    try:
        answer = client.post(f"/work_pools/{quote(pool)}/workers/filter", json={})
        answer.raise_for_status()
    except httpx.HTTPError:
        return False
    beats = [w["last_heartbeat_time"] for w in answer.json() if w["last_heartbeat_time"]]
    return any(_unix(beat) >= since for beat in beats)


def queue_polled(settings: Settings, pool: str, queue: str, *, since: float) -> bool:
    """A worker has asked for work of this queue after `since` (Unix time, s)."""
    client = _http(api_url(settings), auth_string(settings))
    try:
        answer = client.get(f"/work_pools/{quote(pool)}/queues/{quote(queue)}")
        answer.raise_for_status()
    except httpx.HTTPError:
        return False
    polled = answer.json().get("last_polled")
    return bool(polled) and _unix(polled) >= since


def _unix(timestamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(timestamp).timestamp()


def register(settings: Settings, deployments: tuple[Deployment, ...] = DEPLOYMENTS) -> None:
    """Create the work pools and deployments, or bring them up to date. Safe to repeat.

    Raises:
        ConfigError: what should be a job template is none.
        ServiceError: the server refuses, or has a pool of another type.
    """
    load_prefect(settings)
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.exceptions import PrefectException

    try:
        with SyncPrefectClient(api_url(settings), auth_string=auth_string(settings) or None) as client:
            for pool in POOLS:
                _ensure_pool(client, pool)
            ensure_queues(client, settings)
            for deployment in deployments:
                client.create_deployment(
                    client.create_flow_from_name(deployment.flow),
                    deployment.name,
                    entrypoint=deployment.entrypoint,
                    work_pool_name=deployment.pool,
                    job_variables={} if job_template(deployment.pool) else dict(job_variables()),
                    parameter_openapi_schema={},
                    enforce_parameter_schema=False,
                )
    except (PrefectException, httpx.HTTPError) as error:
        raise ServiceError(
            f"The Prefect server at {api_url(settings)} refused the work pools or deployments: {error}. "
            f"See {Layout(settings.home).log('prefect')}."
        ) from error


def job_template(pool: str) -> dict[str, Any] | None:
    """The base job template of a Kubernetes pool; None: `pool` is a process pool.

    Raises:
        ConfigError: the file cannot be read or is no job template.
    """
    folder = PrefectSettings().job_templates
    path = folder / f"{pool}.json" if folder else None
    if path is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"RSI_PREFECT_JOB_TEMPLATES: {path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict) or "job_configuration" not in found:
        raise ConfigError(f"RSI_PREFECT_JOB_TEMPLATES: {path} is no base job template: it lacks `job_configuration`")
    return found


def pool_type(pool: str) -> str:
    """Prefect's word: `kubernetes` starts a pod for each flow run, `process` a process beside the worker."""
    return "kubernetes" if job_template(pool) else "process"


def _ensure_pool(client: "SyncPrefectClient", pool: str) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists

    template, kind = job_template(pool), pool_type(pool)
    try:
        client.create_work_pool(WorkPoolCreate(name=pool, type=kind, base_job_template=template or {}))
    except ObjectAlreadyExists:
        found = client.read_work_pool(pool)
        if found.type != kind:
            raise ServiceError(
                f"The work pool {pool!r} is of type {found.type}, and a pool of type {kind} is asked for; Prefect cannot "
                f"change that. Pause the cycles that run, delete it with `prefect work-pool delete {pool}`, and repeat this."
            ) from None
        if template and found.base_job_template != template:
            client.update_work_pool(pool, WorkPoolUpdate(base_job_template=template))


def job_variables() -> Mapping[str, object]:
    """How a worker starts a flow process.

    Its output goes to a file of its own, not through the worker: a flow that prints into the pipe of a dead worker dies.
    """
    python = "python" if external() else sys.executable  # workers elsewhere have a venv of their own on their PATH
    return {"stream_output": False, "command": f"{python} -m {FLOW_PROCESS}"}


def wait_healthy(settings: Settings, *, timeout_s: float) -> bool:
    """Wait for the server; for callers outside the supervisor."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if healthy(settings):
            return True
        time.sleep(0.2)
    return False
