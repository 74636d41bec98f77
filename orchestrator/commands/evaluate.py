"""`rsi evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator import exports
from orchestrator.commands import terminal

if TYPE_CHECKING:
    from orchestrator import models as m
    from orchestrator.store import Store


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Work")(evaluate)


def evaluate(
    cycle_id: Annotated[int, typer.Argument(help="Cycle whose retained checkpoints are measured.", show_default=False)],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="heldout-names, heldout-combinations, or a suite's folder or manifest (*.toml); several times for several.",
            show_default="both",
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of a generated suite.")] = 120,
    attempts: Annotated[int, typer.Option(min=1, help="Attempts per task (k of Mean@k).")] = 3,
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="Only these checkpoints, e.g. Base, RPR-2.", show_default="all retained")
    ] = None,
) -> None:
    """Measure a cycle's checkpoints on more tasks than the cycle itself did.

    Results are stored beside the cycle's own evaluations and show on its page.

    Examples:

        rsi evaluate 1

        rsi evaluate 1 --suite heldout-names --tasks 400 --checkpoint Base --checkpoint RPR-2
    """
    from orchestrator.measure import measure, suite_named
    from stages.comparison import score_evaluation
    from stages.errors import ConfigError

    here, out = terminal.settings(), terminal.console()
    with terminal.opened_store() as store:
        store.cycles.get(cycle_id)  # says clearly that there is none
        retained = {c.name: c for c in store.checkpoints.of_cycle(cycle_id) if c.retained}
        if not retained:
            raise ConfigError(f"cycle {cycle_id} has no retained checkpoint yet")
        if missing := [name for name in checkpoint or () if name not in retained]:
            raise ConfigError(
                f"cycle {cycle_id} has no retained checkpoint {', '.join(missing)}; it has {', '.join(retained)}"
            )
        rows = [c for name, c in retained.items() if not checkpoint or name in checkpoint]
        suites = [suite_named(name, tasks, here) for name in suite or ("heldout-names", "heldout-combinations")]
        before = {(e.checkpoint_id, e.suite, e.suite_digest) for c in rows for e in _stored(store, c.id)}
        results = measure(store, here, rows, suites, attempts_per_task=attempts, watch=out.print)
    table = terminal.table(
        "checkpoint", "suite", "k / verdicts", "95 %, by task", "k / attempts", "first · any · all", "process reward",
        "turns", "tokens",
        right=("k / verdicts", "95 %, by task", "k / attempts", "process reward", "turns", "tokens"),
    )  # fmt: skip
    notes: dict[str, None] = {}
    for r in results:
        s = score_evaluation(r)
        v, a = s.by_verdicts, s.by_attempts
        table.add_row(
            r.checkpoint,
            r.suite,
            exports.rate(v.passed, v.of),
            f"[{100 * v.wilson.low:.1f}, {100 * v.wilson.high:.1f}]" if v.wilson else terminal.MISSING,
            exports.rate(a.passed, a.of),
            f"{s.first_attempt} · {s.any_attempt} · {s.all_attempts} of {s.tasks}",
            exports.number(s.process_reward, 3),
            f"{r.turns / r.attempts:.1f}",
            f"{r.tokens / r.attempts:.0f}",
        )
        notes |= dict.fromkeys(f"{r.checkpoint} on {r.suite}: {flag.text}" for flag in s.flags)
    out.print(table)
    for c in rows:
        for suite_ in suites:
            others = {d for i, name, d in before if (i, name) == (c.id, suite_.name) and d != suite_.digest}
            if others:
                notes[
                    f"{c.name} was measured on another version of {suite_.name} before ({', '.join(d[:12] for d in others)}; "
                    f"now {suite_.digest[:12]}): the results are kept apart and not averaged"
                ] = None
    for note in notes:
        out.print(f"Note: {note}")


def _stored(store: Store, checkpoint_id: int | None) -> Sequence[m.Evaluation]:
    return store.evaluations.list(checkpoint_ids=[checkpoint_id]).items if checkpoint_id is not None else ()
