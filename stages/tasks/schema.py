"""`task.toml`, Harbor schema 1.4 with its legacy keys, as pydantic models.

Types are strict (a quoted number is an error). Unknown keys are kept and listed by `unknown_keys`: the caller rejects or
warns. What Harbor has no key for stands in `[metadata.terminal_rsi]`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.errors import TaskError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
# what a kernel would refuse, or what no shell could run in
_MOST_MB = 1 << 24
Megabytes = Annotated[int, Field(gt=0, le=_MOST_MB)]
Cpus = Annotated[float, Field(ge=0.01, le=4096)]
Inodes = Annotated[int, Field(ge=64, le=10**9)]
Pids = Annotated[int, Field(ge=8, le=4_000_000)]
OutputBytes = Annotated[int, Field(gt=0, le=1 << 30)]
NetworkMode = Literal["public", "no-network", "allowlist"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


CheckId = Annotated[str, Field(min_length=1)]


class CheckRow(_Table):
    id: CheckId
    role: Literal["scenario", "gate"] = "scenario"


class LimitsTable(_Table):
    inodes: Inodes | None = None
    pids: Pids | None = None
    command_timeout_s: Positive | None = None
    output_bytes: OutputBytes | None = None


class OwnTable(_Table):
    """[metadata.terminal_rsi]"""

    family: str | None = None
    stratum: Literal["easy", "medium", "hard", "extreme"] | None = None
    max_turns: Count | None = None
    nop_progress: Annotated[int, Field(ge=0)] = 0
    categories: list[str] = []
    rootfs: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None  # `rsi rootfs build NAME` on this machine
    checks: list[CheckId | CheckRow] = []  # a bare id is a scenario check
    limits: LimitsTable = LimitsTable()

    @property
    def manifest(self) -> list[CheckRow]:
        return [row if isinstance(row, CheckRow) else CheckRow(id=row) for row in self.checks]


class Phase(_Table):
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class Agent(Phase):
    timeout_sec: Positive | None = None
    user: str | int | None = None


class Healthcheck(_Table):
    """As Docker's HEALTHCHECK."""

    command: str
    interval_sec: Pause = 5.0
    timeout_sec: Positive = 30.0
    start_period_sec: Pause = 0.0  # in which a failure does not count
    start_interval_sec: Pause = 5.0  # between two tries in that time
    retries: Count = 3  # failures in a row


class Environment(_Table):
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    build_timeout_sec: Positive = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: Cpus | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = None  # legacy
    memory: str | None = None  # legacy, "2G"
    storage: str | None = None  # legacy

    @model_validator(mode="after")
    def _sizes(self) -> Environment:
        for legacy in (self.memory, self.storage):
            if legacy is not None:
                megabytes(legacy)
        return self


class Collect(_Table):
    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: str | int | None = None


class Verifier(Phase):
    timeout_sec: Positive = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: list[Collect] = []


class Solution(_Table):
    env: dict[str, str] = {}


class Author(_Table):
    name: str
    email: str | None = None


class Package(_Table):
    name: str
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []


class Artifact(_Table):
    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class Step(_Table):
    name: Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f]*[^/\\\x00-\x1f. ]$")]
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | Artifact] = []


class Metadata(BaseModel):
    """Free, but for our own table."""

    model_config = ConfigDict(extra="allow", frozen=True)
    terminal_rsi: OwnTable = OwnTable()


class TaskToml(_Table):
    """The whole file."""

    schema_version: str = "1.4"
    version: str | None = None  # legacy name of schema_version
    task: Package | None = None
    metadata: Metadata = Metadata()
    environment: Environment = Environment()
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    solution: Solution = Solution()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[Step] | None = None
    artifacts: list[str | Artifact] = []


LEGACY_KEYS = ("version", "environment.allow_internet", "environment.memory", "environment.storage")


def parse_task_toml(text: str, where: str) -> TaskToml:
    """Raises TaskError naming `where`, the key and its line."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        place = line[1] if line else text.count("\n") + 1  # at the end of the document
        raise TaskError(f"{where}:{place}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise TaskError(f"{where}: lists or tables nested too deep to be read") from error
    except ValueError as error:  # a number of thousands of digits
        raise TaskError(f"{where}: {error}") from error
    try:
        return TaskToml.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        path = tuple(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise TaskError(f"{where}:{key_line(text, path)}: {'.'.join(path)}: {first['msg']}{more}") from error


def unknown_keys(config: TaskToml) -> list[tuple[str, ...]]:
    """Paths of keys that neither Harbor nor we know; `[metadata]` is free but for `[metadata.terminal_rsi]`."""
    return sorted(_unknown(config, ()))


def _unknown(model: BaseModel, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not isinstance(model, Metadata):
        for key in model.model_extra or {}:
            yield (*path, key)
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _unknown(value, (*path, name))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _unknown(item, (*path, name, str(i)))


def key_line(text: str, path: tuple[str, ...]) -> int:
    """1-based line of a key, or of the nearest table or array that holds it; 1 if none is found."""
    wanted = [part for part in path if not part.isdigit()]
    occurrence = next((int(part) for part in path if part.isdigit()), 0)
    best, depth, table, seen = 1, 0, [], 0
    for number, row in enumerate(text.splitlines(), 1):
        stripped = row.strip()
        if header := re.match(r"\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$", stripped):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            if stripped.startswith("[[") and table == wanted[: len(table)]:
                seen += 1
                if seen <= occurrence:
                    table = ["\0"]  # an earlier element of the array of tables
        elif key := re.match(r"([\w.\-\"']+)\s*=", stripped):
            full = [*table, *(part.strip("\"'") for part in key[1].split("."))]
            if full == wanted[: len(full)] and len(full) > depth:
                best, depth = number, len(full)
            continue
        if table and table == wanted[: len(table)] and len(table) > depth:
            best, depth = number, len(table)
    return best


def megabytes(size: str) -> int:
    """Legacy sizes: "2G", "512M", "65536K", up to 16 TB. Raises ValueError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMK])(?:I?B)?\s*", size.upper())
    value = float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]] if match else 0
    if not 1 <= value <= _MOST_MB:
        raise ValueError(f"size {size[:40]!r} is not like 2G, 512M or 65536K, or is under 1 MB or over 16 TB")
    return int(value)
