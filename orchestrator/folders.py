"""Folders of checkpoints: whose weights they hold, and that they are the bytes that were recorded."""

from __future__ import annotations

from pathlib import Path

from orchestrator import models as m
from stages.backends.learner.checkpoint import digest_weights
from stages.errors import CheckpointError
from stages.loop import Weights
from stages.records import CheckpointSaved


def holds(folder: Path, record: CheckpointSaved) -> bool:
    """The folder has both parts with the record's digests, and nothing more."""
    return all(
        digest_weights(part) == digest if part.is_dir() and any(part.glob("*.safetensors")) else digest is None
        for part, digest in ((folder / "actor", record.actor_digest), (folder / "critic", record.critic_digest))
    )


def weights_of(row: m.Checkpoint) -> Weights:
    """Where a saved checkpoint's two parts lie. Raises CheckpointError when its folder was removed."""
    folder = Path(row.path)
    if not row.path or not folder.is_dir():
        raise CheckpointError(
            f"checkpoint {row.name} of cycle {row.cycle_id} has no folder any more ({row.path or '—'})"
        )
    actor = folder / "actor" if (folder / "actor").is_dir() else folder
    return Weights(actor=actor, critic=folder / "critic" if row.critic_digest else None)


def verify(row: m.Checkpoint, weights: Weights) -> None:
    """The bytes that are about to be loaded are those that were recorded (design: invariant 1).

    Raises CheckpointError when they are not.
    """
    for part, folder, expected in (
        ("actor", weights.actor, row.actor_digest),
        ("critic", weights.critic, row.critic_digest),
    ):
        if folder is not None and (found := digest_weights(folder)) != expected:
            raise CheckpointError(
                f"checkpoint {row.name}: the {part} in {folder} has digest {found[:12]}…, recorded was "
                f"{(expected or '—')[:12]}…. Restore the folder; nothing was trained on it."
            )
