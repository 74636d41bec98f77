"""The sign of life of a flow, on a real database."""

import time

from orchestrator import models as m
from orchestrator.heartbeat import beating
from orchestrator.store import Store


def test_it_beats_while_the_block_runs_and_then_no_more(store: Store) -> None:
    cycle = store.cycles.create(m.Cycle(name="t", recipe="t", config={}, config_digest="0", seed=0, base_checkpoint=""))
    assert cycle.id is not None

    def last() -> float:
        beat = store.cycles.get(cycle.id or 0).heartbeat_at
        return beat.timestamp() if beat else 0.0

    with beating(store, cycle.id, "flow-7", every_s=0.02):
        first = last()
        assert first > 0
        assert store.cycles.get(cycle.id).flow_run_id == "flow-7"
        until = time.monotonic() + 20
        while last() == first:  # the main thread is busy; the beat comes from another one
            assert time.monotonic() < until
            time.sleep(0.01)
    end = last()
    time.sleep(0.2)
    assert last() == end
    assert store.cycles.get(cycle.id).flow_run_id == "flow-7"
