"""The supervisor: one background process that brings the services up, keeps them up, and takes them down.

`python -m orchestrator.embedded.supervisor` detaches itself and returns at once; `orchestrator.embedded.control` starts
it and follows what it publishes. It holds a lock file for as long as it lives. Invariants: nothing is published as ready
that did not answer; a failed or interrupted start stops everything that it had started; SIGTERM and SIGINT stop all.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

from orchestrator.embedded import database, postgres, prefect_server, processes, services, state
from orchestrator.embedded.child import Child
from orchestrator.embedded.layout import Layout, rotate
from orchestrator.embedded.state import Phase, Published, ServiceState, ServiceStatus
from orchestrator.settings import Settings, get_settings
from stages.errors import RsiError, ServiceError, StopRequested

POLL_S = 0.2
PROBE_EVERY_S = 10.0
RECONCILE_EVERY_S = 60.0
DELIVER_EVERY_S = 5.0
DRAIN_S = 15.0  # for a flow process whose worker is gone to end by SIGTERM

log = logging.getLogger("rsi.supervisor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    console: bool = True
    worker: bool = True


class Supervisor:
    """One run from start to stop. All work is done in the main thread, the reconciler's and the webhook's excepted."""

    def __init__(self, settings: Settings, options: Options) -> None:
        self.settings = settings
        self.options = options
        self.layout = Layout(settings.home)
        self.stop = threading.Event()
        self.children: list[Child] = []
        self._postgres = ServiceStatus(name="postgres", state=ServiceState.WAITING)
        self._phase = Phase.STARTING
        self._error = ""
        self._started_at = time.time()
        self._url = ""

    # ------------------------------------------------------------------ life

    def run(self) -> int:
        """Returns the exit code: 0 after a requested stop, 1 after a failed start."""
        self._publish()
        try:
            self._bring_up()
            self._phase = Phase.READY
            self._publish()
            self._keep_up()
        except StopRequested:
            log.info("stop requested")
        except RsiError as error:
            log.error("%s", error)
            self._error = str(error)
        except Exception as error:
            log.exception("unexpected error")
            self._error = f"{type(error).__name__}: {error}. See {self.layout.log('supervisor')}."
        self._bring_down()
        self._phase = Phase.FAILED if self._error else Phase.STOPPED
        self._publish()
        return 1 if self._error else 0

    def _bring_up(self) -> None:
        self._start_database()
        core = []
        if not prefect_server.external():
            prefect_server.ensure_database(self._url)
            core.append(self._spawn(services.prefect(self.settings, self._url)))
        elif not prefect_server.healthy(self.settings):
            raise ServiceError(
                f"The Prefect server at {prefect_server.api_url(self.settings)} does not answer, or refuses the password. "
                "Check RSI_PREFECT_API_URL and RSI_PREFECT_AUTH."
            )
        console = self._spawn(services.console(self.settings, self._url)) if self.options.console else None
        for child in core:
            self._await(child)
        self._check_stop()
        prefect_server.register(self.settings)
        if self.options.worker:
            self._await(self._spawn(services.worker(self.settings, self._url)))
        if console:
            self._await(console)

    def _start_database(self) -> None:
        from orchestrator.store import schema

        embedded = self.settings.embedded_database
        name = postgres_name(self.settings)
        self._postgres = ServiceStatus(name=name, state=ServiceState.STARTING, since=time.time())
        self._publish()
        self._url = database.start(self.settings)
        self._check_stop()
        schema.upgrade(self._url)
        info = postgres.ensure(self.settings.home) if embedded else None
        self._postgres = ServiceStatus(
            name=name,
            state=ServiceState.READY,
            pid=self._postgres_pid(),
            since=time.time(),
            url=str(info.socket_dir) if info else "",
            log=str(self.layout.home / "postgres" / "data" / "server.log") if info else "",
            message="" if info else "external, named by DATABASE_URL",
        )
        self._publish()
        self._check_stop()

    def _postgres_pid(self) -> int | None:
        """Only shown; whether the server lives is asked by connecting."""
        try:
            return int((self.layout.home / "postgres" / "data" / "postmaster.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return None

    def _spawn(self, service: services.Service) -> Child:
        service.require_port()
        child = Child(service)
        self.children.append(child)
        child.start()
        self._publish()
        return child

    def _await(self, child: Child) -> None:
        """Wait until it answers. A service that ends or stays silent during the first start is an error, not a restart."""
        until = time.monotonic() + child.service.ready_timeout_s
        while not child.probe():
            self._check_stop()
            if (code := child.exit_code()) is not None:
                raise child.failed(f"ended with code {code} before it was ready")
            if time.monotonic() > until:
                raise child.failed(f"did not answer within {child.service.ready_timeout_s:.0f} s")
            self.stop.wait(POLL_S)
        self._publish()

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise StopRequested("The start was interrupted.")

    # ------------------------------------------------------------------ watch

    def _keep_up(self) -> None:
        threading.Thread(target=self._reconcile_forever, name="reconcile", daemon=True).start()
        if self.settings.webhook_url:
            threading.Thread(target=self._deliver_forever, name="webhook", daemon=True).start()
        next_probe = time.monotonic() + PROBE_EVERY_S
        while not self.stop.wait(POLL_S):
            changed = [child.tend() for child in self.children]
            if time.monotonic() >= next_probe:
                changed += [child.check() for child in self.children]
                changed.append(self._tend_postgres())
                next_probe = time.monotonic() + PROBE_EVERY_S
            if any(changed):
                self._publish()

    def _tend_postgres(self) -> bool:
        """Start the embedded server again if it ended. True when the published state changed."""
        if not self.settings.embedded_database or postgres.is_running(self.settings.home):
            return False
        log.warning("Postgres does not answer: starting it again")
        restarts = self._postgres.restarts + 1
        try:
            postgres.ensure(self.settings.home)
            status, message = ServiceState.READY, ""
        except ServiceError as error:
            log.error("%s", error)
            status, message = ServiceState.UNHEALTHY, str(error).splitlines()[0]
        self._postgres = ServiceStatus(
            name="postgres",
            state=status,
            pid=self._postgres_pid(),
            restarts=restarts,
            since=time.time(),
            url=self._postgres.url,
            log=self._postgres.log,
            message=message,
        )
        return True

    def _reconcile_forever(self) -> None:
        while not self.stop.is_set():
            self._repair()
            self.stop.wait(RECONCILE_EVERY_S)

    def _deliver_forever(self) -> None:
        from orchestrator import webhooks

        while not self.stop.wait(DELIVER_EVERY_S):
            try:
                webhooks.deliver_once(self.settings, self._url)
            except Exception:
                # A database that is being restarted, a secret that cannot be read: logged, tried again.
                log.exception("no webhook was delivered")

    def _repair(self, *, interrupt: bool = False) -> None:
        from orchestrator import reconcile

        try:
            if interrupt:
                repairs = reconcile.interrupt(self.settings, self._url, "the services were stopped (`rsi down`)")
            else:
                repairs = reconcile.reconcile(self.settings, self._url)
            for repair in repairs:
                log.warning("cycle %d: %s", repair.cycle_id, repair.message)
        except Exception:
            # A database or server that is being restarted: logged, tried again in a minute.
            log.exception("the reconciler failed")

    # ------------------------------------------------------------------ down

    def _bring_down(self) -> None:
        """Stop in an order that leaves true words behind: cycles are marked, then their processes end, then the rest."""
        was_ready = self._phase is Phase.READY
        self._phase = Phase.STOPPING
        self._publish()
        workers = [c for c in self.children if c.name.startswith("worker")]
        if was_ready:
            self._repair(interrupt=True)
        for child in workers:
            child.terminate()  # takes no new run, and kills the flow processes that it started
        for child in workers:
            child.end(grace_s=15)
        processes.end([p for p in processes.marked(self.settings.home) if processes.is_flow(p)], grace_s=DRAIN_S)
        if was_ready:
            self._repair()
        for child in reversed(self.children):
            child.end(grace_s=10)
            self._publish()
        processes.end(processes.marked(self.settings.home), grace_s=5)
        if self.settings.embedded_database:
            try:
                postgres.stop(self.settings.home)
            except ServiceError as error:
                log.error("%s", error)
                self._error = self._error or str(error)
        self._postgres = ServiceStatus(name=self._postgres.name, state=ServiceState.STOPPED, since=time.time())

    def _publish(self) -> None:
        statuses = (self._postgres, *(child.status() for child in self.children))
        try:
            state.publish(
                self.layout,
                Published(
                    pid=os.getpid(),
                    phase=self._phase,
                    started_at=self._started_at,
                    error=self._error,
                    services=statuses,
                ),
            )
        except OSError as error:
            log.error("cannot publish the state: %s", error)  # a full disk must not take the services down


def postgres_name(settings: Settings) -> str:
    return "postgres" if settings.embedded_database else "database"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-console", action="store_true")
    parser.add_argument("--no-worker", action="store_true")
    parser.add_argument("--foreground", action="store_true", help="do not detach (containers, system services)")
    arguments = parser.parse_args()
    settings = get_settings()
    layout = Layout(settings.home)
    layout.prepare()
    if not arguments.foreground:
        _detach(layout)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for chatty in ("httpx", "alembic.runtime.plugins"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    services.default_signals()
    with state.hold_lock(layout) as mine:
        if not mine:
            log.info("another supervisor is running")
            raise SystemExit(0)
        supervisor = Supervisor(settings, Options(console=not arguments.no_console, worker=not arguments.no_worker))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop.set())
        raise SystemExit(supervisor.run())


def _detach(layout: Layout) -> None:
    """Double fork: the caller's wait returns, and the daemon belongs to init and to no terminal."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    rotate(layout.log("supervisor"))
    with open(os.devnull, "rb") as null, open(layout.log("supervisor"), "ab") as out:
        os.dup2(null.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)


if __name__ == "__main__":
    main()
