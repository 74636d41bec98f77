"""`rsi audit run | list | show | export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator import exports
from orchestrator.commands import terminal

if TYPE_CHECKING:
    from orchestrator import models as m

FAMILIES = 60  # families printed; an export has all of them
LISTED = 10

app = typer.Typer(
    name="audit",
    help="Re-score stored trajectories under other rewards.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Number = Annotated[int, typer.Argument(help="Number of the audit.", show_default=False)]


@app.command()
def run(
    cycle: Annotated[int | None, typer.Option(help="Trajectories of this cycle.")] = None,
    stage: Annotated[str | None, typer.Option(help="Of this stage of the cycle, e.g. RPR-1.")] = None,
    phase: Annotated[str | None, typer.Option(help="Of this phase, e.g. joint or evaluate.")] = None,
    suite: Annotated[str | None, typer.Option(help="On this suite or pool.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Of this checkpoint: number, CYCLE/NAME, or an imported one's name.")
    ] = None,
    formulas: Annotated[str, typer.Option(help="Among fdr, spr, count, binary; separated by commas.")] = "fdr,spr",
    scales: Annotated[
        str, typer.Option(help="fit (on these trajectories), given:CYCLE/STAGE, or given:FILE.json.")
    ] = "fit",
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="SPR with recalibrated scales c_f · D_f instead of D_f.")
    ] = False,
    net_of_nop: Annotated[
        bool, typer.Option("--net-of-nop", help="Subtract the checks that pass when nothing is done.")
    ] = False,
    name: Annotated[str, typer.Option(help="A name for the audit.", show_default="what was chosen")] = "",
) -> None:
    """Re-score a fixed set of stored trajectories, their outcomes unchanged, under several reward formulas.

    Shows the failures' share of reward mass, mean rewards, failures that score 1 or more, and failures that passed every
    executed check but not the gate: overall and per family. Attempts without a verdict are left out and counted.

    Examples:

        rsi audit run --cycle 1 --stage RPR-1

        rsi audit run --checkpoint tmax-9b --formulas fdr,spr,count,binary

        rsi audit run --cycle 2 --scales given:1/RPR-1 --recalibrate
    """
    from orchestrator.audits import AuditSpec, parse_formulas, run_audit, stage_named
    from orchestrator.comparisons import checkpoint_named
    from orchestrator.store import TrajectoryFilter
    from stages.domain import Phase
    from stages.errors import ConfigError
    from stages.rewards import Progress

    kinds = parse_formulas(formulas)
    chosen = (("cycle", cycle), ("stage", stage), ("phase", phase), ("suite", suite), ("checkpoint", checkpoint))
    if stage is not None and cycle is None:
        raise ConfigError("--stage needs --cycle: every cycle has a stage of that name")
    if phase is not None and phase not in set(Phase):
        raise ConfigError(f"unknown phase {phase!r}; choose among {', '.join(Phase)}")
    with terminal.opened_store() as store:
        if cycle is not None:
            store.cycles.get(cycle)  # says clearly that there is none
        where = TrajectoryFilter(
            cycle_id=cycle,
            stage_id=stage_named(store, cycle, stage).id if stage is not None and cycle is not None else None,
            phase=Phase(phase) if phase else None,
            checkpoint_id=checkpoint_named(store, checkpoint).id if checkpoint else None,
            suite=suite,
        )
        spec = AuditSpec(
            where=where,
            formulas=kinds,
            scales=scales,
            recalibrated=recalibrate,
            progress=Progress.NET_OF_NOP if net_of_nop else Progress.RAW,
            name=name or ", ".join(f"{k} {v}" for k, v in chosen if v is not None) or "every stored trajectory",
        )
        _print(run_audit(store, spec))


@app.command("list")
def list_(
    cycle: Annotated[int | None, typer.Option(help="Only those of this cycle.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 50,
) -> None:
    """List stored audits, newest first. Those with the same set re-scored the same trajectories.

    Example:

        rsi audit list --cycle 1
    """
    with terminal.opened_store() as store:
        found = store.audits.list(cycle_id=cycle, limit=limit).items
    if not found:
        terminal.console().print("No audit yet. `rsi audit run` makes one.")
        return
    rows = terminal.table("Id", "Name", "Set", "Attempts", "Masked", "Formulas", "Made", right=("Id", "Attempts"))
    for a in found:
        labels = ", ".join(f["label"] for f in a.formulas)
        counts = (str(a.result.get("verdicts", terminal.MISSING)), str(a.result.get("masked", terminal.MISSING)))
        rows.add_row(
            str(a.id), a.name, terminal.short(a.set_digest), *counts, labels, f"{terminal.age(a.created_at)} ago"
        )
    terminal.console().print(rows)


@app.command()
def show(
    audit: Number,
    against: Annotated[int | None, typer.Option(help="Show another audit's figures beside it.")] = None,
) -> None:
    """Show one audit, or two side by side; says whether both re-scored the same set.

    Examples:

        rsi audit show 1

        rsi audit show 1 --against 2
    """
    from orchestrator.audits import same_set

    with terminal.opened_store() as store:
        first = store.audits.get(audit)
        other = store.audits.get(against) if against is not None else None
    _print(first)
    if other is not None:
        _print(other)
        same = "the same set: their figures compare" if same_set([first, other]) else "different sets: do not subtract"
        terminal.console().print(f"Audits {first.id} and {other.id} re-scored {same}.")


@app.command()
def export(
    audit: Number,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="standard output")
    ] = None,
    format_: Annotated[exports.Format, typer.Option("--format", help="Kind of file.")] = exports.Format.CSV,
    failures: Annotated[
        bool, typer.Option("--failures", help="The lists of failures instead of the figures (CSV and Markdown).")
    ] = False,
) -> None:
    """Export an audit's figures per formula and family, or its lists of failures. JSON has both.

    Examples:

        rsi audit export 1 -o audit.csv

        rsi audit export 1 --failures --format markdown
    """
    from orchestrator import audits

    with terminal.opened_store() as store:
        row = store.audits.get(audit)
        listed = audits.failures(store, row) if failures or format_ is exports.Format.JSON else []
    rows: list[dict[str, Any]] = listed if failures else row.result["rows"]
    match format_:
        case exports.Format.CSV:
            text = exports.to_csv(rows)
        case exports.Format.MARKDOWN:
            text = exports.to_markdown(rows)
        case exports.Format.JSON:
            figures = {k: v for k, v in row.result.items() if k != "lists"}
            document = row.model_dump(mode="json", exclude={"result"}) | figures | {"failures": listed}
            text = exports.to_json(document)
    exports.deliver(text, output)


def _print(audit: m.Audit) -> None:
    out = terminal.console()
    result = audit.result
    out.print(f"Audit {audit.id}: {audit.name}", style="bold")
    out.print(
        f"{result['verdicts']} attempts with a verdict, {result['masked']} without one left out · set "
        f"{terminal.short(audit.set_digest)} · scales {audit.selection.get('scales')}"
        + (", recalibrated for SPR" if audit.selection.get("recalibrated") else "")
    )
    columns = ("Attempts", "Passed", "Failure share", "Mean pass", "Mean fail", "Fail ≥ 1", "Gate only")
    rows = terminal.table("Formula", "Family", *columns, right=columns)
    families = {r["family"] for r in result["rows"]}
    for r in result["rows"]:
        if r["family"] and len(families) - 1 > FAMILIES:
            continue
        share = r["failure_share"]
        rows.add_row(
            r["formula"],
            r["family"] or "overall",
            str(r["attempts"]),
            str(r["successes"]),
            terminal.MISSING if share is None else f"{100 * share:.2f} %",
            exports.number(r["mean_success"]),
            exports.number(r["mean_failure"]),
            str(r["failures_at_or_above_one"]),
            str(r["gate_only_failures"]),
        )
    out.print(rows)
    if len(families) - 1 > FAMILIES:
        out.print(f"{len(families) - 1} families: `rsi audit export {audit.id}` has them.")
    floored = sorted({s["family"] for f in audit.formulas for s in f["scales"] if s["floored"]})
    borrowed = sorted({s["family"] for f in audit.formulas for s in f["scales"] if s["borrowed_from"]})
    if floored:
        out.print(f"Scales at the floor of one check: {', '.join(floored[:LISTED])}" + _more(floored))
    if borrowed:
        out.print(f"Too few attempts, so the scale is borrowed: {', '.join(borrowed[:LISTED])}" + _more(borrowed))


def _more(names: list[str]) -> str:
    return f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
