"""Two parents per checkpoint: where the actor came from, where the critic came from, and what did not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from orchestrator.models import Checkpoint
from orchestrator.store import Store
from stages.errors import CheckpointError

Digests = Callable[[Path], tuple[str, str | None]]  # checkpoint folder -> (actor digest, critic digest) of its bytes


class Side(StrEnum):
    ACTOR = "actor"
    CRITIC = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Parent to child, for one of the two models."""

    parent_id: int
    child_id: int
    side: Side
    unchanged: bool  # equal digests: Δθ = 0 or Δφ = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A graph without cycles. Checkpoints in order of id: parents come first."""

    checkpoints: Sequence[Checkpoint]
    edges: Sequence[Edge]


class Proof(StrEnum):
    """What can be said about Δφ of one checkpoint against its critic parent."""

    UNCHANGED = "Δφ = 0"  # the digests are equal
    CHANGED = "Δφ ≠ 0"
    NO_CRITIC = "no critic yet"
    NEW = "new critic"  # there was none before
    DROPPED = "critic missing"  # the parent has one, the child has none


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticProof:
    """Design: invariant 1. `recomputed` says that both digests were taken anew from the files."""

    checkpoint_id: int
    parent_id: int | None
    before: str | None
    after: str | None
    proof: Proof
    recomputed: bool = False


def ancestors(store: Store, checkpoint_ids: Sequence[int]) -> Lineage:
    """The given checkpoints and everything that they came from, through either parent."""
    return _graph(list(store.checkpoints.line(checkpoint_ids).values()))


def of_cycle(store: Store, cycle_id: int, *, candidates: bool = False) -> Lineage:
    """The graph of one cycle, with the ancestors that lie in other cycles."""
    rows = store.checkpoints.of_cycle(cycle_id, candidates=candidates)
    return ancestors(store, [row.id for row in rows if row.id is not None])


def in_line(store: Store, cycle_id: int, name: str) -> Checkpoint | None:
    """The checkpoint of this name in a cycle, or else in the cycle that it was forked from, and so on; None: not yet."""
    for at in line_of(store, cycle_id):
        if (found := store.checkpoints.named(at, name)) is not None:
            return found
    return None


def line_of(store: Store, cycle_id: int) -> list[int]:
    """A cycle and those that it was forked from, newest first."""
    found: list[int] = []
    at: int | None = cycle_id
    while at is not None and at not in found:
        found.append(at)
        at = (store.cycles.get(at).config.get("fork") or {}).get("cycle")
    return found


def inherited(store: Store, cycle_id: int, name: str) -> Checkpoint:
    """As `in_line`. Raises CheckpointError when none of them has it."""
    if (found := in_line(store, cycle_id, name)) is not None:
        return found
    line = line_of(store, cycle_id)
    raise CheckpointError(
        f"no checkpoint {name!r} in cycle {' nor in cycle '.join(map(str, line))}: finish the stage that makes it "
        f"(`rsi cycle show {line[-1]}`) before anything is forked from it"
    )


def prove_critic(store: Store, checkpoint_id: int, digests: Digests | None = None) -> CriticProof:
    """Compare a checkpoint's critic with that of its critic parent.

    With `digests` both are recomputed from the bytes on disk, and must be what the rows say.

    Raises:
        CheckpointError: a folder's bytes have another digest than its row.
    """
    child = store.checkpoints.get(checkpoint_id)
    parent = store.checkpoints.get(child.critic_parent_id) if child.critic_parent_id else None
    if digests is not None:
        for row in filter(None, (parent, child)):
            _verify(row, digests)
    return compare_critics(child, parent, recomputed=digests is not None)


def compare_critics(child: Checkpoint, parent: Checkpoint | None, *, recomputed: bool = False) -> CriticProof:
    """The same from two rows. `parent` is the child's critic parent."""
    before, after = parent.critic_digest if parent else None, child.critic_digest
    if after is None:
        proof = Proof.NO_CRITIC if before is None else Proof.DROPPED
    elif before is None:
        proof = Proof.NEW
    else:
        proof = Proof.UNCHANGED if before == after else Proof.CHANGED
    return CriticProof(
        checkpoint_id=child.id or 0,
        parent_id=parent.id if parent else None,
        before=before,
        after=after,
        proof=proof,
        recomputed=recomputed,
    )


def _verify(row: Checkpoint, digests: Digests) -> None:
    if not row.path:
        raise CheckpointError(f"Checkpoint {row.name} has no folder, so its digests cannot be recomputed.")
    actor, critic = digests(Path(row.path))
    if (actor, critic) != (row.actor_digest, row.critic_digest):
        raise CheckpointError(
            f"Checkpoint {row.name}: the files in {row.path} have other digests (actor {actor}, critic {critic}) than were "
            f"recorded ({row.actor_digest}, {row.critic_digest}). Restore the folder from a copy."
        )


def _graph(rows: Sequence[Checkpoint]) -> Lineage:
    ordered = sorted(rows, key=lambda row: row.id or 0)
    known = {row.id: row for row in ordered}
    edges = []
    for child in ordered:
        for side, parent_id in ((Side.ACTOR, child.actor_parent_id), (Side.CRITIC, child.critic_parent_id)):
            if parent_id is not None and (parent := known.get(parent_id)) is not None:
                before, after = _digest(parent, side), _digest(child, side)
                edges.append(
                    Edge(
                        parent_id=parent_id,
                        child_id=child.id or 0,
                        side=side,
                        unchanged=before is not None and before == after,
                    )
                )
    return Lineage(checkpoints=ordered, edges=edges)


def _digest(row: Checkpoint, side: Side) -> str | None:
    return row.actor_digest if side is Side.ACTOR else row.critic_digest
