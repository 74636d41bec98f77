"""Experiments: a question, its arms × seeds, and the branches that they share."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

from orchestrator.models.columns import JSONB, Timestamp, created, now


class Experiment(SQLModel, table=True):
    """One specification. Its state is that of its runs' cycles, so it is not stored."""

    __tablename__ = "experiment"

    id: int | None = Field(default=None, primary_key=True)
    name: str = Field(unique=True)
    spec: dict[str, Any] = Field(sa_type=JSONB)  # as it was read, without its seeds
    spec_digest: str  # SHA-256 of the canonical JSON of `spec`
    created_by: str = ""
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class Branch(SQLModel, table=True):
    """A stretch of stages that one cycle runs for every arm, of any experiment, whose settings agree up to its end."""

    __tablename__ = "branch"

    key: str = Field(primary_key=True)  # SHA-256 of everything that its last stage depends on
    cycle_id: int = Field(foreign_key="cycle.id", unique=True)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class ExperimentRun(SQLModel, table=True):
    """One arm with one seed. Its last cycle leads to the whole path through `config.fork`."""

    __tablename__ = "experiment_run"

    experiment_id: int = Field(foreign_key="experiment.id", primary_key=True)
    arm: str = Field(primary_key=True)
    seed: int = Field(primary_key=True, sa_type=sa.BigInteger)
    position: int = 0  # of the arm in the specification
    cycle_id: int | None = Field(default=None, foreign_key="cycle.id", index=True)  # None: its prefix is not done yet
    error: str = ""  # why it cannot go on, where no cycle says so
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
