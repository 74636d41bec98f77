"""One supervised child process: started, watched, started again with growing pauses, ended."""

import logging
import subprocess
import time

from orchestrator.embedded.layout import tail
from orchestrator.embedded.services import Service
from orchestrator.embedded.state import ServiceState, ServiceStatus
from stages.errors import ServiceError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STABLE_S = 60.0  # a child that lived this long starts over with a short pause
SILENT_PROBES = 6  # so many failed probes in a row end a child that runs but does not answer

log = logging.getLogger("rsi.supervisor")


class Child:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._state = ServiceState.WAITING
        self._since = time.time()
        self._started = 0.0
        self._due = 0.0  # monotonic time of the next start
        self._pause = FIRST_PAUSE_S
        self._silent = 0
        self._terminated = False
        self._message = ""

    @property
    def name(self) -> str:
        return self.service.name

    def start(self) -> None:
        self._started = time.time()
        self._silent = 0
        self._terminated = False
        self._process = self.service.start()
        self._set(ServiceState.STARTING)
        log.info("%s started, pid %d", self.name, self._process.pid)

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process else None

    def probe(self) -> bool:
        """Ask once whether it answers; a first answer makes it ready."""
        if self.exit_code() is not None or not self.service.ready(self._started):
            return False
        self._silent = 0
        self._set(ServiceState.READY)
        return True

    def tend(self) -> bool:
        """Notice an end, and start it again when the pause is over. True when its state changed."""
        if self._process is None:
            return False
        if self._state is ServiceState.RESTARTING:
            if time.monotonic() < self._due:
                return False
            self.restarts += 1
            try:
                self.service.require_port()
                self.start()
            except (ServiceError, OSError) as error:
                self._again(str(error))
            return True
        if (code := self._process.poll()) is None:
            return False
        if time.time() - self._started > STABLE_S:
            self._pause = FIRST_PAUSE_S
        self._again(f"ended with code {code}; the last lines are in {self.service.log}")
        return True

    def check(self) -> bool:
        """Probe a running child; one that stays silent is ended, and `tend` starts it again."""
        if self._state not in {ServiceState.STARTING, ServiceState.READY, ServiceState.UNHEALTHY}:
            return False
        if self._state is ServiceState.READY and not self.service.probed:
            return False
        before = self._state
        if self.probe():
            return self._state is not before
        if self._state is not ServiceState.STARTING:
            self._silent += 1
            self._set(ServiceState.UNHEALTHY, f"no answer to {self._silent} probe(s)")
        too_long = time.time() - self._started > self.service.ready_timeout_s
        if self._silent >= SILENT_PROBES or (self._state is ServiceState.STARTING and too_long):
            log.warning("%s does not answer: ending it", self.name)
            self._end_process(5.0)
        return self._state is not before

    def terminate(self) -> None:
        """SIGTERM, without waiting. `end` will not send another one: a second makes Prefect's worker kill itself."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            self._terminated = True

    def end(self, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Idempotent."""
        if self._process:
            self._end_process(grace_s)
        self._set(ServiceState.STOPPED)

    def failed(self, what: str) -> ServiceError:
        """The error of a start that did not succeed, with the last lines of its log."""
        return ServiceError(
            f"The service {self.name} {what}. Its log ({self.service.log}) ends with:\n{tail(self.service.log)}\n"
            "Nothing was left running. `rsi doctor` checks the usual causes."
        )

    def status(self) -> ServiceStatus:
        running = self._process is not None and self._process.poll() is None
        return ServiceStatus(
            name=self.name,
            state=self._state,
            pid=self._process.pid if running and self._process else None,
            port=self.service.port,
            url=self.service.url,
            log=str(self.service.log),
            restarts=self.restarts,
            since=self._since,
            message=self._message,
        )

    def _again(self, why: str) -> None:
        log.warning("%s %s; starts again in %.0f s", self.name, why, self._pause)
        self._due = time.monotonic() + self._pause
        self._set(ServiceState.RESTARTING, why)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def _end_process(self, grace_s: float) -> None:
        assert self._process is not None
        if not self._terminated:
            self.terminate()
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)

    def _set(self, state: ServiceState, message: str = "") -> None:
        if state is not self._state:
            self._since = time.time()
        self._state = state
        self._message = message
