"""What `rsi demo` shows while it waits."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.progress import Progress

from orchestrator import models as m
from orchestrator.demo import _draw


def test_a_stage_whose_last_phases_are_equally_long_is_shown_as_done() -> None:
    stage = m.Stage(cycle_id=1, name="RSR-1", kind="rsr", position=1, started_at=datetime.now(UTC))
    with Progress(disable=True) as bars:
        bar = bars.add_task("RSR-1", total=None, start=False, phase="", text="")
        for done in (0, 120, 0, 120, 0):  # two suites of 120 attempts
            stage.state, stage.phase = m.StageState.RUNNING, "evaluate"
            stage.progress_done, stage.progress_total = done, 120
            _draw(bars, bar, stage)
            assert not bars.tasks[0].finished, "its clock would stand still"
        for _ in range(2):
            stage.state = m.StageState.DONE
            _draw(bars, bar, stage)
            assert (bars.tasks[0].completed, bars.tasks[0].fields["phase"]) == (1, "done")
            assert bars.tasks[0].finished
