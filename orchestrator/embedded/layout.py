"""Folders and files of an installation that the supervisor uses: everything lies under `home`."""

import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stages.errors import ServiceError

MIN_FREE_MB = 500  # below this a first start (initdb, Prefect's migrations, a checkpoint) would run into a full disk
ROTATE_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class Layout:
    home: Path

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def lock(self) -> Path:
        """Locked (flock) for as long as the supervisor lives; its text is the supervisor's pid."""
        return self.run / "supervisor.lock"

    @property
    def state(self) -> Path:
        """What the supervisor last published, as JSON."""
        return self.run / "services.json"

    @property
    def prefect_home(self) -> Path:
        return self.home / "prefect"

    @property
    def prefect_auth(self) -> Path:
        """`user:password` of the Prefect API, readable by the owner only."""
        return self.home / "secrets" / "prefect-auth"

    def log(self, service: str) -> Path:
        return self.home / "logs" / f"{service}.log"

    def flow_log(self, flow_run_id: str) -> Path:
        """Standard output and error of one flow process."""
        return self.home / "logs" / "flows" / f"{flow_run_id}.log"

    def prepare(self) -> None:
        """Create the folders and prove that they can be written.

        Raises:
            ServiceError: no permission, a file in the way, a read-only or full disk.
        """
        try:
            for folder in (self.run, self.log("x").parent, self.flow_log("x").parent, self.prefect_home):
                folder.mkdir(parents=True, exist_ok=True)
            self.prefect_auth.parent.mkdir(mode=0o700, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.run) as probe:
                probe.write(b"x" * 4096)
                probe.flush()
                os.fsync(probe.fileno())
            free_mb = shutil.disk_usage(self.home).free / 1e6
        except OSError as error:
            raise ServiceError(
                f"Cannot write to {error.filename or self.home}: {error.strerror}. Make room, correct the permissions, "
                "or choose another folder: rsi --home DIR, or RSI_HOME=DIR."
            ) from error
        if free_mb < MIN_FREE_MB:
            raise ServiceError(
                f"Only {free_mb:.0f} MB are free on the disk of {self.home}; {MIN_FREE_MB} MB are needed to start. "
                "Make room, or choose another folder: rsi --home DIR, or RSI_HOME=DIR."
            )

    def auth(self) -> str:
        """The Prefect API's `user:password`, made once."""
        try:
            return self.prefect_auth.read_text().strip()
        except FileNotFoundError:
            pass
        self.prefect_auth.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.prefect_auth.with_name(f".prefect-auth-{secrets.token_hex(4)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write(f"rsi:{secrets.token_urlsafe(24)}\n")
        try:
            os.link(fresh, self.prefect_auth)  # the first of two processes wins; both read the same
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
        return self.prefect_auth.read_text().strip()


def rotate(log: Path) -> None:
    """Move a long log aside (`.1`), so that logs of a long-lived installation stay bounded."""
    if log.exists() and log.stat().st_size > ROTATE_BYTES:
        log.replace(log.with_name(log.name + ".1"))


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error message."""
    try:
        with open(log, "rb") as handle:
            handle.seek(max(0, log.stat().st_size - 20_000))
            text = handle.read().decode(errors="replace")
    except FileNotFoundError:
        return "(no log yet)"
    return "\n".join(text.splitlines()[-lines:])
