"""TCP ports on loopback: is one free, and if not, who holds it."""

import errno
import socket

import psutil

from stages.errors import ServiceError


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """True when a server could bind `host:port` now. Raises ServiceError for a port that nobody may bind."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ServiceError(
                f"Cannot bind {host}:{port}: {error.strerror}. Choose a port above 1023 and an address of this machine."
            ) from error
    return True


def holder(port: int) -> str | None:
    """Who listens on `port`, as "pid 12: python -m …"; None when the system does not tell (another user's process)."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port or connection.pid is None:
            continue
        try:
            process = psutil.Process(connection.pid)
            command = " ".join(process.cmdline())[:80] or process.name()
        except psutil.Error:
            return f"pid {connection.pid}"
        return f"pid {connection.pid}: {command}"
    return None


def require_free(port: int, *, service: str, option: str, host: str = "127.0.0.1") -> None:
    """Raises ServiceError that names the port, its holder if known, and the option that moves the service."""
    if is_free(port, host):
        return
    who = holder(port)
    held = f"held by {who}" if who else "held by a process that this user cannot see"
    raise ServiceError(f"Port {port} for the {service} is in use, {held}. Stop it, or choose another port: {option}.")


def pick_free(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
