"""The only place with SQL. One repository per noun; `Store` holds them all."""

from orchestrator.store.base import Page
from orchestrator.store.connection import connect
from orchestrator.store.facade import Store
from orchestrator.store.trajectories import TrajectoryFilter

__all__ = ["Page", "Store", "TrajectoryFilter", "connect"]
