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
        statement, recomputed = verify_statement(row) if verify else ("digests as recorded", False)
        if said := critic_statement(store, row, recompute=recomputed):
            out.print(said)
        out.print(statement)


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
    if folder.exists():
        raise CheckpointError(f"{folder} exists already. Name a new folder, or remove it.")
    statement, verified = verify_statement(row)
    if not verified:
        raise CheckpointError(f"Checkpoint {row.id} is not exported: {statement}.")
    actor, critic_folder = weight_folders(row)
    fresh = folder.with_name(f"tmp_{folder.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(actor, fresh)
    if critic and critic_folder:
        shutil.copytree(critic_folder, fresh / "critic")
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


def critic_statement(store: Store, row: m.Checkpoint, *, recompute: bool) -> str:
    """What the critic's digest and its parent's say about Δφ (design: invariant 1); empty before there is a critic."""
    from orchestrator.lineage import Proof, prove_critic

    assert row.id is not None
    proof = prove_critic(store, row.id, digests_of if recompute else None)
    if proof.proof is Proof.NO_CRITIC:
        return ""  # the line above says so
    before, after = terminal.short(proof.before), terminal.short(proof.after)
    how = "recomputed from both folders" if proof.recomputed else "as recorded"
    return f"{proof.proof}  critic before {before}, after {after} ({how})"


def weight_folders(row: m.Checkpoint) -> tuple[Path, Path | None]:
    """Folders of actor and critic. Base is a model folder without an `actor/` in it."""
    folder = Path(row.path)
    actor = folder / "actor" if (folder / "actor").is_dir() else folder
    return actor, folder / "critic" if row.critic_digest else None


def digests_of(folder: Path) -> tuple[str, str | None]:
    """Actor and critic digest of the bytes in a checkpoint folder. Raises CheckpointError when it holds no weights."""
    from stages.backends.learner.checkpoint import digest_weights

    actor = folder / "actor" if (folder / "actor").is_dir() else folder
    return digest_weights(actor), digest_weights(folder / "critic") if (folder / "critic").is_dir() else None


def verify_statement(row: m.Checkpoint) -> tuple[str, bool]:
    """Recomputes the digests from the bytes on disk; the sentence, and whether they are the recorded ones."""
    if not row.path or not Path(row.path).is_dir():
        return f"not verified: the folder {row.path or '(unknown)'} is not on this machine", False
    actor, critic = digests_of(Path(row.path))
    wrong = [
        f"the {part} is {terminal.short(found)}, recorded {terminal.short(recorded)}"
        for part, found, recorded in (("actor", actor, row.actor_digest), ("critic", critic, row.critic_digest))
        if found != recorded
    ]
    if wrong:
        return f"NOT the recorded bytes: {'; '.join(wrong)}; restore the folder from a copy", False
    return "verified: the bytes on disk have the recorded digests", True
