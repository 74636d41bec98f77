"""`rsi checkpoint list | show | export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands import terminal

if TYPE_CHECKING:
    from orchestrator import models as m
    from orchestrator.store.facade import Store

app = typer.Typer(
    name="checkpoint", help="List, prove and export checkpoints.", no_args_is_help=True, rich_markup_mode="markdown"
)
Reference = Annotated[
    str,
    typer.Argument(help="Number, CYCLE/NAME (3/RPR-1), or at least 8 digits of a digest.", show_default=False),
]


@app.command("list")
def list_(
    cycle: Annotated[int | None, typer.Option(help="Only those of this cycle.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also candidates of single steps.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 50,
) -> None:
    """List checkpoints with their parents and digests, newest first.

    Examples:

        rsi checkpoint list --cycle 3

        rsi checkpoint list --all
    """
    with terminal.opened_store() as store:
        found = store.checkpoints.list(cycle_id=cycle, limit=limit).items
        if not all_:
            found = [c for c in found if c.step is None or c.retained]
        if not found:
            terminal.console().print("No checkpoint yet.")
            return
        rows = terminal.table(
            "Id", "Cycle", "Name", "Actor", "Critic", "Actor parent", "Critic parent", "Saved",
            right=("Id", "Cycle", "Actor parent", "Critic parent"),
        )  # fmt: skip
        for row in found:
            rows.add_row(
                str(row.id),
                str(row.cycle_id or terminal.MISSING),
                row.name + (" (parent kept)" if row.parent_kept else ""),
                terminal.short(row.actor_digest),
                terminal.short(row.critic_digest) if row.critic_digest else "no critic yet",
                str(row.actor_parent_id or terminal.MISSING),
                str(row.critic_parent_id or terminal.MISSING),
                f"{terminal.age(row.created_at)} ago",
            )
        terminal.console().print(rows)


@app.command()
def show(
    reference: Reference,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Recompute the digests from the files.")] = True,
) -> None:
    """Show one checkpoint: both parents, scores, and whether the bytes on disk still have the recorded digests.

    After a self-rewrite stage it shows the critic's digest before and after (Δφ = 0).

    Examples:

        rsi checkpoint show 3/RSR-2

        rsi checkpoint show 17 --no-verify
    """
    out = terminal.console()
    with terminal.opened_store() as store:
        row = find(store, reference)
        out.print(
            f"Checkpoint {row.id} {row.name}" + (f" of cycle {row.cycle_id}" if row.cycle_id else ""), style="bold"
        )
        out.print(f"folder  {row.path or terminal.MISSING}")
        for part, digest, parent_id in (
            ("actor", row.actor_digest, row.actor_parent_id),
            ("critic", row.critic_digest, row.critic_parent_id),
        ):
            parent = store.checkpoints.get(parent_id) if parent_id else None
            origin = f" from {parent.name} ({parent.id})" if parent else ""
            out.print(f"{part:<7} {digest or 'no critic yet'}{origin}")
        out.print(critic_statement(store, row))
        if verify:
            out.print(verify_statement(row))


@app.command()
def export(
    reference: Reference,
    folder: Annotated[Path, typer.Argument(help="New folder to write to.", show_default=False, metavar="DIR")],
    critic: Annotated[bool, typer.Option("--critic", help="Also export the critic.")] = False,
) -> None:
    """Copy the actor as a Hugging Face folder that `transformers` (and `rsi cycle launch --model`) can load.

    The digests are checked first; the folder appears complete or not at all.

    Example:

        rsi checkpoint export 3/RPR-2 ~/models/rpr-2
    """
    import shutil

    from stages.errors import CheckpointError

    with terminal.opened_store() as store:
        row = find(store, reference)
    source = Path(row.path)
    if not row.path or not (source / "actor").is_dir():
        raise CheckpointError(
            f"The weights of checkpoint {row.id} are not on this machine (folder {row.path or 'unknown'})."
        )
    if folder.exists():
        raise CheckpointError(f"{folder} exists already. Name a new folder, or remove it.")
    statement = verify_statement(row)
    if not statement.startswith("verified"):
        raise CheckpointError(f"Checkpoint {row.id} is not exported: {statement}")
    fresh = folder.with_name(f"tmp_{folder.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source / "actor", fresh)
    if critic and row.critic_digest:
        shutil.copytree(source / "critic", fresh / "critic")
    fresh.rename(folder)
    terminal.console().print(f"Exported {row.name} to {folder}.")


def find(store: Store, reference: str) -> m.Checkpoint:
    """The checkpoint of a number, `cycle/name`, or a digest's first digits.

    Raises:
        StoreError: there is none, or several.
    """
    from stages.errors import StoreError

    if reference.isdecimal() and len(reference) < 8:
        return store.checkpoints.get(int(reference))
    cycle, slash, name = reference.partition("/")
    if slash and cycle.isdecimal():
        for row in store.checkpoints.of_cycle(int(cycle), candidates=True):
            if row.name.lower() == name.lower():
                return row
        raise StoreError(f"Cycle {cycle} has no checkpoint {name!r}. `rsi checkpoint list --cycle {cycle}` shows them.")
    found = store.checkpoints.with_digest(reference)
    if len(found) == 1:
        return found[0]
    if not found:
        raise StoreError(f"No checkpoint has the digest {reference}. `rsi checkpoint list` shows those that exist.")
    ids = ", ".join(f"{row.id} ({row.name})" for row in found)
    raise StoreError(f"Several checkpoints have the digest {reference}: {ids}. Name one by its number.")


def critic_statement(store: Store, row: m.Checkpoint) -> str:
    """What the two critic digests say about Δφ (design: invariant 1)."""
    if row.critic_digest is None:
        return "Δφ: no critic yet"
    parent = store.checkpoints.get(row.critic_parent_id) if row.critic_parent_id else None
    if parent is None or parent.critic_digest is None:
        return "Δφ: the critic begins here"
    before, after = terminal.short(parent.critic_digest), terminal.short(row.critic_digest)
    if parent.critic_digest == row.critic_digest:
        return f"Δφ = 0: the critic's digest is equal before and after ({before} = {after}, of {parent.name})"
    return f"Δφ ≠ 0: the critic was trained here ({before} → {after})"


def verify_statement(row: m.Checkpoint) -> str:
    """Recomputes the digests from the bytes on disk. Starts with "verified" when all are equal."""
    from stages.backends.learner.checkpoint import digest_weights
    from stages.errors import CheckpointError

    folder = Path(row.path)
    if not row.path or not folder.is_dir():
        return f"not verified: the folder {row.path or '(unknown)'} is not on this machine"
    wrong = []
    for part, recorded in (("actor", row.actor_digest), ("critic", row.critic_digest)):
        if recorded is None:
            continue
        try:
            found = digest_weights(folder / part)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        if found != recorded:
            wrong.append(f"the {part} is {terminal.short(found)}, recorded {terminal.short(recorded)}")
    return f"NOT the recorded bytes: {'; '.join(wrong)}" if wrong else "verified: the bytes on disk have these digests"
