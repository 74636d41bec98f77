"""A flow that does nothing for a while: what a worker starts in tests/integration/test_services.py."""

import time

from prefect import flow


@flow(name="stub", log_prints=False)
def stub_flow(cycle_id: int, seconds: float = 0.0) -> int:
    print(f"stub flow of cycle {cycle_id}", flush=True)
    until = time.monotonic() + (seconds or (60 if cycle_id >= 1000 else 0))  # a large id asks for a long run
    while time.monotonic() < until:
        time.sleep(0.1)
    return cycle_id
