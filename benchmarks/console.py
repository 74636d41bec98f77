"""The console on a year's rows: latency of every list page at 10 requests a second, and the memory of its process.

    python benchmarks/console.py                     # 1,000,000 trajectories, 10,000 runbooks, 200 cycles; 3-4 minutes
    python benchmarks/console.py --scale 0.02        # a fiftieth, for a quick look
    python benchmarks/console.py --keep /tmp/rows    # fill that folder's Postgres once, and measure on it again and again

One Postgres and one console process (`uvicorn webui.app:start`, as `rsi up` starts it) on this machine. Requests
leave every 100 ms whatever became of those before (an open loop), addresses interleaved at random; latency counts from
the moment at which a request should have left. Targets: p95 of 150 ms for lists, 300 ms for comparison and audit pages,
1 s for the trajectory with 5,000 turns, 400 MB of resident memory. Exits with 1 when one does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from console_rows import LONG, Size, fill

from orchestrator import models as m
from orchestrator.audits import AuditSpec, run_audit
from orchestrator.embedded import ports, postgres
from orchestrator.settings import Settings
from orchestrator.store import Store, TrajectoryFilter, schema
from webui.sign_in import COOKIE, Keys

LIST_MS, COMPARE_MS, LONG_MS, MEMORY_MB = 150, 300, 1000, 400
RATE = 10  # requests a second


@dataclass(frozen=True, slots=True)
class Address:
    path: str
    kind: str
    target_ms: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    address: Address
    median_ms: float
    p95_ms: float
    worst_ms: float

    @property
    def holds(self) -> bool:
        return self.p95_ms <= self.address.target_ms


def addresses(store: Store) -> list[Address]:
    """Lists with their usual and their hardest filters, pages of one thing, comparisons, audits."""
    cycles = store.cycles.list(limit=200).items
    newest, middle = cycles[0].id or 0, cycles[len(cycles) // 2].id or 0
    points = [c.id for c in store.checkpoints.of_cycle(middle)]
    audit = store.audits.list(limit=1).items[0].id
    middle_seq = store.trajectories.list(TrajectoryFilter(cycle_id=middle), limit=1).items[0].seq
    gates = store.review_queue.waiting_gates()
    runbook = store.runbooks.list(stage_id=gates[0][0], limit=1).items[0].id if gates else ""
    lists = (
        *("/", "/cycles", "/cycles?state=failed", "/cycles?q=cycle+1", "/checkpoints", "/checkpoints?candidates=1"),
        *(f"/checkpoints?cycle={middle}", "/lineage", f"/lineage?cycle={middle}", "/experiments", "/audits"),
        *("/trajectories", f"/trajectories?before={middle_seq}", f"/trajectories?cycle={middle}&verdict=passed"),
        *("/trajectories?family=family-7", "/trajectories?suite=suite-2&task=task-17", "/trajectories?flagged=1"),
        *("/trajectories?gate=1", "/trajectories?costly=1", f"/trajectories?cycle={newest}&costly=1"),
        "/trajectories?verdict=failed&end=token_cap",
        "/trajectories?family=family-7&stratum=easy&verdict=verifier_error&end=done",  # fits nothing
        "/trajectories?family=nowhere&stratum=hard&verdict=passed",
        *("/suspicious", "/reviews", "/reviews?mine=1", "/reviews?state=all", "/reviews?state=rejected"),
        *("/inbox", "/audit-log", "/audit-log?actor=person-3&action=sign-in", "/people", "/tokens"),
        *("/api/v1/trajectories?limit=100", "/api/v1/reviews?state=open"),
    )
    ones = (
        *(f"/cycles/{middle}", f"/cycles/{middle}/logs", f"/cycles/{middle}/config", f"/cycles/{middle}/stages/rpr-1"),
        *(f"/checkpoints/{points[2]}", "/tasks/suite-2/task-17", f"/trajectories/{2:024x}"),
        *([f"/reviews/{runbook}"] if runbook else []),
    )
    compared = ",".join(map(str, points))
    comparisons = (
        *("/compare", f"/compare?c={compared}", f"/compare?c={compared}&view=matrix&suite=suite-1"),
        *(f"/compare?c={compared}&view=strata&suite=suite-1", f"/compare?c={compared}&view=curves&suite=suite-1"),
        *(f"/compare?c={compared}&view=config&suite=suite-1", f"/compare?c={compared}&view=cost&suite=suite-1"),
        *(f"/compare?c={compared}&view=selection&suite=suite-1", f"/cycles/{middle}/analysis"),
        *(f"/audits/{audit}", "/audits/new"),
    )
    return [
        *(Address(path, "list", LIST_MS) for path in lists),
        *(Address(path, "one", COMPARE_MS) for path in ones),
        *(Address(path, "compare", COMPARE_MS) for path in comparisons),
        Address(f"/trajectories/{LONG}", "5,000 turns", LONG_MS),
    ]


def measure(client: httpx.Client, pages: Sequence[Address], *, rounds: int, rate: float) -> list[Line]:
    """`rounds` requests of each address. Raises RuntimeError for an answer that is no page."""
    order = [page for page in pages for _ in range(rounds)]
    random.Random(7).shuffle(order)
    taken: dict[str, list[float]] = {page.path: [] for page in pages}
    begin = time.perf_counter() + 0.1

    def ask(number: int, page: Address) -> None:
        due = begin + number / rate
        answer = client.get(page.path)
        if answer.status_code != 200:
            raise RuntimeError(f"{page.path} answered {answer.status_code}: {answer.text[:300]}")
        taken[page.path].append(1000 * (time.perf_counter() - due))

    with ThreadPoolExecutor(32) as pool:
        asked = []
        for number, page in enumerate(order):
            time.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            asked.append(pool.submit(ask, number, page))
        for future in asked:
            future.result()
    return [_line(page, sorted(taken[page.path])) for page in pages]


def _line(page: Address, times: list[float]) -> Line:
    p95 = times[min(len(times) - 1, round(0.95 * (len(times) - 1)))]
    return Line(page, times[len(times) // 2], p95, times[-1])


@contextmanager
def console(home: Path, url: str) -> Iterator[tuple[str, psutil.Process]]:
    """The console in a process of its own: its address and its process."""
    port = ports.pick_free()
    environment = os.environ | {"RSI_HOME": str(home), "RSI_DATABASE_URL": url, "RSI_CONSOLE_PORT": str(port)}
    command = [sys.executable, "-m", "uvicorn", "webui.app:start", "--factory", "--port", str(port)]
    child = subprocess.Popen([*command, "--log-level", "warning"], env=environment)
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{base}/healthz", timeout=2).raise_for_status()
                break
            except httpx.HTTPError:
                if time.monotonic() > deadline or child.poll() is not None:
                    raise RuntimeError("the console did not start within 60 s") from None
                time.sleep(0.1)
        yield base, psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait(timeout=20)


@contextmanager
def rows(folder: Path | None, size: Size) -> Iterator[tuple[Store, Path, str]]:
    """A filled database: a fresh one that goes away, or the one of `folder`, which is filled once."""
    home = folder or Path(tempfile.mkdtemp(prefix="rsi-console-"))
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o755)  # as root the server runs under another account, which must get in
    info = postgres.ensure(home, durable=False)
    url = postgres.ensure_database(info, f"console_{size.trajectories}")
    schema.upgrade(url)
    store = Store.open(url, home / "artifacts")
    try:
        if not store.cycles.list(limit=1).items:
            start = time.monotonic()
            fill(store.engine, size)
            spec = AuditSpec(where=TrajectoryFilter(cycle_id=store.cycles.list(limit=1).items[0].id), name="newest")
            run_audit(store, spec, created_by="benchmark")
            print(f"filled in {time.monotonic() - start:.0f} s")
        yield store, home, url
    finally:
        store.close()
        postgres.stop(home, mode="immediate" if folder is None else "fast")
        if folder is None:
            shutil.rmtree(home, ignore_errors=True)


def cookie(store: Store, home: Path) -> dict[str, str]:
    """Somebody with every role, signed in."""
    user = store.users.named("benchmark") or store.users.add("benchmark", list(m.Role))
    return {COOKIE: Keys.of(Settings(home=home)).cookie(store.sign_ins.open(user.id or 0, "benchmark"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=20, help="requests of each address")
    parser.add_argument("--keep", type=Path, help="folder whose Postgres is filled once and kept")
    args = parser.parse_args()
    size = Size.scaled(args.scale)
    print(
        f"{size.trajectories:,} trajectories, {size.runbooks:,} runbooks, {size.cycles} cycles; {os.cpu_count()} CPUs"
    )
    with rows(args.keep, size) as (store, home, url), console(home, url) as (base, process):
        pages = addresses(store)
        with httpx.Client(base_url=base, cookies=cookie(store, home), timeout=60) as client:
            measure(
                client, pages, rounds=1, rate=RATE
            )  # templates, plans and caches of a console that has run for a minute
            lines = measure(client, pages, rounds=args.rounds, rate=RATE)
        memory = process.memory_info().rss / 2**20
    for line in sorted(lines, key=lambda x: (x.address.kind, -x.p95_ms)):
        print(
            f"  {line.address.kind:12s} p95 {line.p95_ms:6.0f} ms (<= {line.address.target_ms:4d})  median "
            f"{line.median_ms:6.0f}  worst {line.worst_ms:6.0f}  {'ok    ' if line.holds else 'FAILED'} {line.address.path}"
        )
    fits = memory <= MEMORY_MB
    print(f"  memory of the console {memory:.0f} MB (<= {MEMORY_MB})   {'ok' if fits else 'FAILED'}")
    failed = [line for line in lines if not line.holds]
    print(f"  {len(lines) - len(failed)} of {len(lines)} addresses within their target")
    return 0 if fits and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
