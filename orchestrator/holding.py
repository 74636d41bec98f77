"""One process holds one cycle: it takes it, is told to stop, and lets go of it in the state that was really reached."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator import gate
from orchestrator import models as m
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.store.logs import NewLine
from orchestrator.transitions import HELD_BY_PROCESS, enter
from stages.errors import ConfigError, RsiError, StopRequested
from stages.loop import ReviewPending

S = m.CycleState


class PauseRequested(StopRequested):
    """A person asked for a pause."""


class CancelRequested(StopRequested):
    """A person asked to stop for good."""


class Superseded(StopRequested):
    """Another process has taken the stage over; this one must write no state any more."""


@dataclass(slots=True)
class Outcome:
    """Where a cycle ended up when its process let go of it."""

    state: m.CycleState = S.RUNNING


@contextlib.contextmanager
def settle(store: Store, cycle_id: int, settings: Settings | None = None) -> Iterator[Outcome]:
    """Enter `running`, and on the way out the state that the cycle has really reached.

    Raises ConfigError when the cycle is not queued or resuming: another process holds it, or nobody asked for it to run.
    """
    outcome = Outcome()
    _take(store, cycle_id)
    try:
        yield outcome
        outcome.state = enter(store, cycle_id, S.DONE).state
    except Superseded as error:
        _log(store, cycle_id, logging.WARNING, str(error))
        outcome.state = store.cycles.get(cycle_id).state  # whatever the other process wrote
    except ReviewPending:
        enter(store, cycle_id, S.SUSPENDED)
        gate.wake(store, cycle_id, settings=settings)
        outcome.state = store.cycles.get(cycle_id).state
    except CancelRequested:
        outcome.state = enter(store, cycle_id, S.CANCELLED).state
    except PauseRequested:
        outcome.state = enter(store, cycle_id, S.PAUSED).state
    except BaseException as error:
        with contextlib.suppress(RsiError):  # the database itself may be what failed
            text = str(error) if isinstance(error, RsiError) else f"{type(error).__name__}: {error}"
            _log(store, cycle_id, logging.ERROR, _trace(error))
            enter(store, cycle_id, S.FAILED, error=text)
        raise


def _take(store: Store, cycle_id: int) -> None:
    with store.transaction():
        state = store.cycles.lock(cycle_id).state
        if state in HELD_BY_PROCESS:
            raise ConfigError(
                f"Cycle {cycle_id} is {state}: another process holds it. Wait until it lets go, or pause it first "
                f"(`rsi cycle pause {cycle_id}`). If that process was killed, `rsi cycle resume {cycle_id}` finds out."
            )
        if state not in (S.QUEUED, S.RESUMING):
            raise ConfigError(f"Cycle {cycle_id} is {state}; ask for it with `rsi cycle resume {cycle_id}` first.")
        enter(store, cycle_id, S.RUNNING)


def _log(store: Store, cycle_id: int, level: int, text: str) -> None:
    store.logs.append(cycle_id, [NewLine(level=level, logger="rsi.cycle", text=text)])


def _trace(error: BaseException) -> str:
    return str(error) if isinstance(error, RsiError) else "".join(traceback.format_exception(error))[-8000:]
