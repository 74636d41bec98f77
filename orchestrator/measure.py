"""Measure stored checkpoints on more tasks than their cycle did: `rsi evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator import models as m
from orchestrator.inputs import EMBEDDED, open_backends, refuse_docker_only
from orchestrator.recipes import parse_config
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.chat import Chat
from stages.config import CycleConfig, LearnerConfig
from stages.context import StageContext
from stages.errors import ConfigError
from stages.evaluate import evaluate
from stages.records import EvaluationDone, Progress
from stages.tasks.embedded import embedded_suite
from stages.tasks.generate import PoolKind
from stages.tasks.harbor import Suite, load_suite


def suite_named(name: str, n_tasks: int, settings: Settings) -> Suite:
    """`heldout-names`, `heldout-combinations` (generated, `n_tasks` large), or the path of a suite's folder or manifest."""
    kind = name.removeprefix(EMBEDDED)
    if kind in (PoolKind.HELDOUT_NAMES, PoolKind.HELDOUT_COMBINATIONS):
        return embedded_suite(kind, n_tasks, settings.home / "suites")
    if not Path(name).exists():
        raise ConfigError(
            f"suite {name!r}: use {PoolKind.HELDOUT_NAMES}, {PoolKind.HELDOUT_COMBINATIONS}, or a suite's folder or manifest"
        )
    suite = load_suite(Path(name))
    refuse_docker_only(suite)
    return suite


def measure(
    store: Store,
    settings: Settings,
    checkpoints: Sequence[m.Checkpoint],
    suites: Sequence[Suite],
    *,
    attempts_per_task: int = 3,
    watch: Callable[[str], None] = lambda text: None,
) -> list[EvaluationDone]:
    """Mean@k of each checkpoint on each suite, with its cycle's harness and sampling; stored as evaluations.

    Attempts' outcomes are stored per task, not their transcripts. Raises ConfigError for a checkpoint without a cycle.
    """
    results = []
    for suite in suites:  # the digests of its tasks say later which of them a changed version left as they were
        store.suites.register(
            suite.name, suite.digest, m.Split.HELD_OUT, suite.tasks, version=suite.version, path=str(suite.path)
        )
    for checkpoint in checkpoints:
        if checkpoint.cycle_id is None:
            raise ConfigError(f"checkpoint {checkpoint.name} belongs to no cycle; its harness settings are unknown")
        config = parse_config(store.cycles.get(checkpoint.cycle_id).config, f"cycle {checkpoint.cycle_id}")
        folder = Path(checkpoint.path)
        actor = folder / "actor" if (folder / "actor").is_dir() else folder
        for suite in suites:
            watch(f"{checkpoint.name} on {suite.name} ({len(suite.tasks)} tasks × {attempts_per_task}) …")
            done = evaluate_folder(
                config, actor, checkpoint.name, suite, attempts_per_task=attempts_per_task, watch=watch
            )
            store.evaluations.save(done, cycle_id=checkpoint.cycle_id, checkpoint_id=checkpoint.id)
            results.append(done)
    return results


def evaluate_folder(
    config: CycleConfig,
    actor: Path,
    name: str,
    suite: Suite,
    *,
    attempts_per_task: int,
    watch: Callable[[str], None] = lambda text: None,
) -> EvaluationDone:
    """Mean@k of one model folder on a whole suite, under a cycle's settings. Stores nothing."""
    settings = config.evaluate.model_copy(update={"attempts_per_task": attempts_per_task, "n_tasks": None})
    # Nothing is trained: neither the GPUs of the learner nor the routes of experts are needed.
    trains_nothing = config.model_copy(update={"learner": LearnerConfig(use_rollout_routing_replay=False)})
    with open_backends(trains_nothing, actor) as backends:
        ctx = StageContext(
            backends=backends,
            chat=Chat(actor),
            rollout=config.rollout,
            seed=(config.seed, "measure", "main"),
            namespace="measure",
            max_new_tokens=settings.sampling.max_new_tokens,
            work_dir=actor,
        )
        stream = evaluate(ctx, settings, suite, name, actor, keep_attempts=False)
        while True:
            try:
                record = next(stream)
            except StopIteration as stop:
                done: EvaluationDone = stop.value
                return done
            if isinstance(record, Progress):
                watch(f"  {record.done}/{record.total}: {record.text}")
