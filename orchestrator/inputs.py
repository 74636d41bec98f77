"""What a cycle works on: suites, their splits and checks, the base model, the backends."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from orchestrator import models as m
from orchestrator.rootfs import for_sandboxes
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.backends.protocols import Backends, Sampler
from stages.chat import Chat
from stages.config import CycleConfig
from stages.errors import CheckpointError, ConfigError, ModelError, StoreError
from stages.tasks.embedded import embedded_suite
from stages.tasks.generate import PoolKind
from stages.tasks.harbor import Suite, load_suite
from stages.tasks.overlap import find_overlap, refuse_overlap

EMBEDDED = "embedded:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suites:
    """The pool that trains, the suite that selects, and the suites that are reported."""

    pool: Suite
    validation: Suite
    reported: tuple[Suite, ...]


def shipped_model() -> Path:
    """The Base that comes with the package. Raises ModelError when it is not installed."""
    folder = Path(str(resources.files("stages"))) / "assets" / "base"
    if not (folder / "model.safetensors").exists():
        raise ModelError(
            f"{folder}: the shipped model is missing. Build it with `rsi model build`, or name one with --model."
        )
    return folder


def base_folder(store: Store, reference: str) -> Path | None:
    """The folder that `CycleConfig.model` takes, from a word of a form: a checkpoint's number, CYCLE/NAME, or a folder.

    None for "shipped" and for nothing: the model that comes with the package.
    Raises StoreError for an unknown checkpoint, CheckpointError for one that has no folder here.
    """
    if reference in ("", "shipped"):
        return None
    number, slash, name = reference.partition("/")
    if not number.isdecimal() or len(number) > 9:
        return Path(reference).expanduser()
    row = store.checkpoints.named(int(number), name) if slash else store.checkpoints.get(int(number))
    if row is None:
        raise StoreError(f"Cycle {number} has no checkpoint {name!r}.")
    folder = Path(row.path)
    if not row.path or not folder.is_dir():
        raise CheckpointError(
            f"Checkpoint {row.id} ({row.name}) has no folder on this machine: its weights were removed."
        )
    return folder / "actor" if (folder / "actor").is_dir() else folder


def model_folder(config: CycleConfig) -> Path:
    """The base model's folder, checked for what the loop needs before anything starts."""
    folder = config.model.expanduser().resolve() if config.model else shipped_model()
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder. --model takes a Hugging Face model folder.")
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder}: no config.json. --model takes a complete Hugging Face model folder.")
    if not list(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: no .safetensors weights. Save the model with safe_serialization.")
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"{folder}: no tokenizer.json. Save the tokenizer beside the weights.")
    return folder


def refuse_unsupported(config: CycleConfig) -> None:
    """Raises ConfigError or ModelError when the base model cannot be trained by the recipe's learner in its layout.

    Whether a machine has the GPUs is found out on the worker that would use them (`open_backends`).
    """
    from stages.backends.learner.build import check_model

    check_model(config.learner, model_folder(config))


def load_suites(config: CycleConfig, settings: Settings) -> Suites:
    """Generates embedded suites on first use. Raises ConfigError when validation overlaps a reported suite or the pool."""
    home = settings.home / "suites"
    pool = (
        embedded_suite(PoolKind.TRAIN, config.pool_size, home)
        if config.pool == "embedded"
        else load_suite(Path(config.pool))
    )
    validation = (
        embedded_suite(PoolKind.VALIDATION, config.validation_size, home)
        if config.validation_suite == "embedded"
        else load_suite(Path(config.validation_suite))
    )
    reported = tuple(_reported(name, config, home) for name in config.reported_suites)
    refuse_overlap(validation, reported)
    for suite in (validation, *reported):
        if found := find_overlap(pool, suite):
            raise ConfigError(
                f"the pool {pool.name!r} shares {len(found)} tasks with {suite.name!r} (first: {found[0].task} and "
                f"{found[0].other}, {found[0].kind}): take them out of the pool, what trains may not measure"
            )
    for suite in (pool, validation, *reported):
        refuse_docker_only(suite)
    return Suites(pool=pool, validation=validation, reported=reported)


def refuse_docker_only(suite: Suite) -> None:
    """Raises ConfigError naming the tasks of a suite that the bubblewrap sandboxes of cycles would run wrongly."""
    found = [f"{task.id}: {'; '.join(task.needs_docker)}" for task in suite.tasks if task.needs_docker]
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(
            f"{len(found)} of {len(suite.tasks)} tasks of {suite.name!r} need what the sandboxes of cycles do not have "
            f"({'; '.join(found[:3])}{more}): take them out, or build a root filesystem that has it and name it in their "
            "task.toml (`rsi rootfs build --help`)"
        )


def _reported(name: str, config: CycleConfig, home: Path) -> Suite:
    if not name.startswith(EMBEDDED):
        return load_suite(Path(name))
    kind = name.removeprefix(EMBEDDED)
    if kind not in (PoolKind.HELDOUT_NAMES, PoolKind.HELDOUT_COMBINATIONS):
        raise ConfigError(
            f"reported suite {name!r}: use {EMBEDDED}{PoolKind.HELDOUT_NAMES}, {EMBEDDED}{PoolKind.HELDOUT_COMBINATIONS} "
            "or the path of a suite folder"
        )
    return embedded_suite(kind, config.reported_size, home)


def register_suites(store: Store, suites: Suites) -> None:
    rows = [(suites.pool, m.Split.TRAIN), (suites.validation, m.Split.VALIDATION)]
    rows += [(suite, m.Split.HELD_OUT) for suite in suites.reported]
    for suite, split in rows:
        store.suites.register(suite.name, suite.digest, split, suite.tasks, version=suite.version, path=str(suite.path))


def open_backends(config: CycleConfig, model: Path) -> Backends:
    """Sampler and learner as the recipe names them, bubblewrap. Raises ConfigError as `refuse_unsupported`."""
    refuse_unsupported(config)
    if config.uses_harness("terminus2") and shutil.which("tmux", path="/usr/bin:/bin") is None:
        raise ConfigError("the harness terminus2 needs tmux on this machine: install it, or set rollout.harness=shell")
    from stages.backends.learner.build import build_learner
    from stages.backends.sandbox.bubblewrap import BubblewrapBackend

    known, default = for_sandboxes(Settings())
    return Backends(
        sampler=open_sampler(config, model, Settings()),
        learner=build_learner(config.learner, seed=config.seed),
        sandbox=BubblewrapBackend(rootfs=known, default_rootfs=default),
    )


def open_sampler(config: CycleConfig, model: Path, settings: Settings) -> Sampler:
    """The embedded sampler, or a client of SGLang servers, which asks them nothing before it is used.

    Raises ConfigError when the recipe wants servers and none is named.
    """
    if config.sampler.backend == "embedded":
        from stages.backends.sampler.embedded import EmbeddedSampler

        return EmbeddedSampler(model, weight_version="Base", num_threads=config.rollout.sampler_threads)
    refuse_without_servers(config, settings)
    from stages.backends.sampler.sglang import SGLangSampler

    return SGLangSampler(
        settings.sglang_servers,
        model_path=model,
        timeout_s=config.sampler.timeout_s,
        update_timeout_s=config.sampler.timeout_s,
        # only evaluations truncate, and they take no ratio: local steps sample at temperature 1 and top-p 1 (spec §5)
        truncated="plain",
        need_routes=config.learner.use_rollout_routing_replay,
        owner=secrets.token_hex(4),
        remote_path=_path_for_servers(settings),
    )


def refuse_without_servers(config: CycleConfig, settings: Settings) -> None:
    """Raises ConfigError when the recipe samples on SGLang servers and RSI_SGLANG_… does not say where they are, or how
    weights get to them. Asks no server anything."""
    if config.sampler.backend != "sglang":
        return
    wrong = [u for u in settings.sglang_servers if not u.startswith(("http://", "https://"))]
    if wrong or not settings.sglang_servers:
        raise ConfigError(
            f'sampler.backend = "sglang" and RSI_SGLANG_URLS is {settings.sglang_urls!r}: name the servers as'
            " http://host:port, with commas, where cycles are launched and where they run; or set sampler.backend ="
            ' "embedded"'
        )
    _path_for_servers(settings)


def _path_for_servers(settings: Settings) -> Callable[[Path], str]:
    """From a model folder here to its path on the servers, which may copy it there. Raises ConfigError."""
    from stages.backends.sampler.publish import PublishedWeights

    url, path = settings.sglang_weights_url, settings.sglang_weights_path
    if path and not url:
        raise ConfigError(
            f"RSI_SGLANG_WEIGHTS_PATH is {path!r} and RSI_SGLANG_WEIGHTS_URL is empty: name the folder or URL that the servers"
            " have mounted there, or leave both empty where they see the folders here under the same path"
        )
    return PublishedWeights(url, path) if url else str


def open_model(folder: Path) -> tuple[Sampler, Chat]:
    """Another model beside the actor: a planner or a reviewer. Raises ModelError when the folder is incomplete."""
    from stages.backends.sampler.embedded import EmbeddedSampler

    return EmbeddedSampler(folder, weight_version=folder.name), Chat(folder)
