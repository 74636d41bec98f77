"""`rsi experiment plan | run | show | report | list`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator import exports
from orchestrator.commands import terminal

if TYPE_CHECKING:
    from orchestrator.experiments.spec import ExperimentSpec

app = typer.Typer(
    name="experiment",
    help="Arms × seeds that settle a question: plan, run, resume, report.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Spec = Annotated[
    str,
    typer.Argument(help="A shipped specification, or the path of a .toml file.", show_default=False, metavar="SPEC"),
]
Name = Annotated[
    str, typer.Argument(help="Name or number (`rsi experiment list`).", show_default=False, metavar="EXPERIMENT")
]
Seeds = Annotated[
    str | None,
    typer.Option(help="Seeds, separated by commas, e.g. 0,1,2.", show_default="the specification's", metavar="N,N,…"),
]


@app.command()
def plan(spec: Spec, seeds: Seeds = None) -> None:
    """Show the arms, what they share, and what it will cost. Runs and stores nothing.

    Arms that are the same function of the data, or that differ in nothing, are refused with the reason.

    Examples:

        rsi experiment plan critic-inheritance

        rsi experiment plan factorial --seeds 0,1,2
    """
    _plan(_load(spec, seeds))


@app.command()
def run(
    spec: Spec,
    seeds: Seeds = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Run an experiment in this terminal; Ctrl-C stops it after the current record, and the same command goes on.

    The prefix that arms share runs once per seed. Every branch is a cycle: the console shows it while it runs. What another
    experiment already ran is used. Seeds may be added later.

    Examples:

        rsi experiment run critic-inheritance --seeds 0,1

        rsi experiment run my-question.toml --yes
    """
    from orchestrator.experiments.report import report_of, summary
    from orchestrator.experiments.run import Watch, opened, run_experiment
    from stages.errors import RsiError

    loaded, out = _load(spec, seeds), terminal.console()
    _plan(loaded)
    if not yes and out.is_terminal:
        typer.confirm("Run it?", default=True, abort=True)
    asked: list[int] = []

    def interrupted(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt  # the second time: now, and the last record is repeated
        asked.append(number)
        out.print("Stopping after this record … (once more: now)")

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        with opened(terminal.settings()) as store:
            watch = Watch(say=out.print, record=_Printer(out.print), stop=lambda: bool(asked))
            outcome = run_experiment(store, terminal.settings(), loaded, watch=watch)
            out.print(f"{outcome.done} of {outcome.of} branches are done.")
            row = store.experiments.named(loaded.name)
            if outcome.done and row is not None:
                for line in summary(report_of(store, row)):
                    out.print(line)
    finally:
        signal.signal(signal.SIGINT, before)
    if outcome.stopped:
        out.print("Stopped. The same command goes on from the last finished record.")
        raise typer.Exit(130)
    if outcome.failures:
        raise RsiError(
            f"{len(outcome.failures)} branches did not finish; the same command tries them again:\n"
            + "\n".join(f"  {where}: {why}" for where, why in outcome.failures.items())
        )
    out.print(f"`rsi experiment report {loaded.name}` writes the report; the console shows it under /experiments.")


@app.command("list")
def list_(limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 20) -> None:
    """List experiments, newest first, and the specifications that are shipped.

    Example:

        rsi experiment list
    """
    from orchestrator.experiments.progress import progress_of
    from orchestrator.experiments.run import opened
    from orchestrator.experiments.spec import load_spec, spec_names

    out = terminal.console()
    with opened(terminal.settings()) as store:
        rows = store.experiments.list(limit=limit).items
        found = progress_of(store, rows)
    table = terminal.table("Id", "Name", "State", "Runs done", "Question", right=("Id", "Runs done"))
    for row, progress in zip(rows, found, strict=True):
        table.add_row(
            str(row.id), row.name, progress.state, f"{progress.done} of {progress.of}", row.spec.get("question", "")
        )
    out.print(table if rows else "No experiment yet. `rsi experiment run SPEC` runs one.")
    out.print("\nShipped specifications:")
    for name in spec_names():
        out.print(f"  {name}: {load_spec(name).question}")


@app.command()
def show(experiment: Name) -> None:
    """Show one experiment: every arm and seed with its state, its cycle and its result.

    Example:

        rsi experiment show critic-inheritance
    """
    from orchestrator.experiments.report import experiment_named, report_of, summary
    from orchestrator.experiments.run import opened

    with opened(terminal.settings()) as store:
        report = report_of(store, experiment_named(store, experiment))
    out = terminal.console()
    table = terminal.table("Arm", "Seed", "State", "Cycle", "Checkpoint", "Strict success", right=("Seed", "Cycle"))
    for r in report.runs:
        cells = ", ".join(f"{s.removeprefix('embedded:')} {exports.rate(*c)}" for s, c in r.success.items())
        table.add_row(
            r.arm, str(r.seed), r.state, str(r.cycle_id or terminal.MISSING), r.checkpoint or terminal.MISSING, cells
        )
    out.print(f"{report.name}: {report.question}", style="bold")
    out.print(table)
    for line in summary(report):
        out.print(line)


@app.command()
def report(
    experiment: Name,
    format_: Annotated[exports.Format, typer.Option("--format", help="Kind of output.")] = exports.Format.MARKDOWN,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="standard output")
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="With CSV: one row per arm and seed instead.")] = False,
) -> None:
    """Write the report: arms × seeds, effects with intervals, EV curves, cost, what was shown and what was not.

    Works while the experiment runs: what is missing is said. CSV gives one row per effect and outcome.

    Examples:

        rsi experiment report critic-inheritance -o docs/experiments/critic-inheritance.md

        rsi experiment report reward --format csv -o reward.csv
    """
    from orchestrator.experiments.export import effect_rows, run_rows, to_document, to_markdown
    from orchestrator.experiments.report import experiment_named, report_of
    from orchestrator.experiments.run import opened

    with opened(terminal.settings()) as store:
        made = report_of(store, experiment_named(store, experiment))
    match format_:
        case exports.Format.MARKDOWN:
            text = to_markdown(made)
        case exports.Format.CSV:
            text = exports.to_csv(run_rows(made) if runs else effect_rows(made))
        case exports.Format.JSON:
            text = exports.to_json(to_document(made))
    exports.deliver(text, output)


# --------------------------------------------------------------------------- parts


def _load(name: str, seeds: str | None) -> ExperimentSpec:
    from orchestrator.experiments.spec import load_spec
    from stages.errors import ConfigError

    try:
        chosen = [int(part) for part in seeds.split(",")] if seeds is not None else []
    except ValueError:
        raise ConfigError(f"--seeds {seeds!r}: give whole numbers separated by commas, e.g. --seeds 0,1,2") from None
    return load_spec(name, seeds=chosen)


def _plan(spec: ExperimentSpec) -> None:
    from orchestrator.experiments.run import checked
    from orchestrator.experiments.tree import branches, total

    configs = checked(spec)
    late = [arm for arm in spec.arms() if arm.match is not None]
    tree = branches({run: c for run, c in configs.items() if spec.arm_named(run[0]).match is None})
    out = terminal.console()
    out.print(f"{spec.name}: {spec.question}", style="bold")
    out.print(f"recipe {spec.recipe}, seeds {', '.join(map(str, spec.seeds))}, {len(spec.arms())} arms\n")
    table = terminal.table("Arm", "Differs in", "Departs from the specification in")
    for arm in spec.arms():
        config = spec.config(arm, spec.seeds[0])
        departures = dict.fromkeys(d for r in config.rpr for d in r.departures())
        changes = ", ".join(f"{k} = {v}" for k, v in arm.set.items()) or (
            "the recipe as it is" if not arm.match else ""
        )
        changes += f"matched to {arm.match} once that is done" if arm.match else ""
        table.add_row(arm.name, changes, ", ".join(departures) or terminal.MISSING)
    out.print(table)
    out.print()
    work = terminal.table(
        "Stages", "Seed", "For", "Attempts", "Updates", "Expected", right=("Seed", "Attempts", "Updates")
    )
    for b in tree:
        e = b.estimate
        between = f"{terminal.duration(e.wall_s[0])} to {terminal.duration(e.wall_s[1])}"
        work.add_row(b.title, str(b.seed), b.label, str(e.attempts), str(e.updates), between)
    out.print(work)
    for arm in late:
        out.print(f"{arm.name}, every seed: planned once {arm.match} is done, and as much again")
    again = [b for b in tree for arm, seed in b.runs for a in late if (arm, seed) == (a.match, b.seed)]
    whole = total([*tree, *again])
    out.print(
        f"\n{len(tree) + len(late) * len(spec.seeds)} branches, {whole.attempts} attempts, {whole.updates} updates: "
        f"{terminal.duration(whole.wall_s[0])} to {terminal.duration(whole.wall_s[1])} on two cores. What was run already is "
        "used again."
    )
    if len(spec.seeds) == 1:
        out.print("One seed: effects get no interval over seeds. --seeds 0,1,2 runs three.")


class _Printer:
    """A line when a phase begins or ends, and one per update."""

    def __init__(self, say: Any) -> None:
        self._say = say

    def __call__(self, branch: Any, stage: Any, record: Any) -> None:
        from stages.records import PhaseDone, Progress

        where = f"  {stage.name}, seed {branch.seed} ({branch.label})"
        if isinstance(record, PhaseDone):
            self._say(f"{where}: {record.phase} done")
        elif isinstance(record, Progress) and record.phase in ("calibrate", "joint"):
            self._say(f"{where}: {record.phase} {record.done}/{record.total}, {record.text}")
