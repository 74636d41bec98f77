"""`rsi setup`, `console`, `reconcile`: what `rsi up` does in one process, one by one, for containers and system services."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from orchestrator.commands import terminal

WAIT_S = 120.0


def register(app: typer.Typer) -> None:
    for command in (setup, console, reconcile):
        app.command(rich_help_panel="Production")(command)


def setup() -> None:
    """Bring the database up to date and register work pools and deployments with Prefect. Safe to repeat.

    `rsi up` does it by itself; here it is for a Postgres and a Prefect server of your own, named by DATABASE_URL,
    RSI_PREFECT_API_URL and RSI_PREFECT_AUTH.

    Example:

        DATABASE_URL=postgresql://me@db/rsi RSI_PREFECT_API_URL=http://prefect:4200/api rsi setup
    """
    from orchestrator.embedded import database, prefect_server
    from orchestrator.store import schema
    from stages.errors import ServiceError

    settings = terminal.settings()
    schema.upgrade(database.url(settings))
    out = terminal.console()
    out.print("Database: up to date.")
    if not prefect_server.wait_healthy(settings, timeout_s=WAIT_S):
        raise ServiceError(
            f"The Prefect server at {prefect_server.api_url(settings)} does not answer within {WAIT_S:.0f} s, or refuses the "
            "password. Check RSI_PREFECT_API_URL and RSI_PREFECT_AUTH."
        )
    prefect_server.register(settings)
    names = ", ".join(d.full_name for d in prefect_server.DEPLOYMENTS)
    pools = ", ".join(f"{pool} ({prefect_server.pool_type(pool)})" for pool in prefect_server.POOLS)
    out.print(f"Prefect: work pools {pools}; deployments {names}.")


def console(
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, metavar="N", help="Port.", show_default="8400")] = None,
) -> None:
    """Run only the console, in the foreground.

    The database is brought up to date first.

    Example:

        DATABASE_URL=postgresql://me@db/rsi rsi console --host 0.0.0.0 --port 8080
    """
    from orchestrator.embedded import database, ports, services
    from orchestrator.store import schema

    settings = terminal.settings()
    settings = settings.model_copy(
        update={"console_host": host or settings.console_host, "console_port": port or settings.console_port}
    )
    url = database.url(settings)
    ports.require_free(
        settings.console_port, service="console", option="rsi console --port N", host=settings.console_host
    )
    schema.upgrade(url)
    service = services.console(settings, url)
    terminal.console().print(f"Console on {service.url}; Ctrl-C stops it.")
    sys.stdout.flush()
    services.default_signals()
    os.execve(service.command[0], service.command, {**os.environ, **service.environment})


def reconcile(
    every: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Go on for ever.", show_default="once")
    ] = None,
) -> None:
    """Find cycles whose process is gone and make them resumable, and send due webhooks. `rsi up` does both by itself.

    Examples:

        rsi reconcile

        rsi reconcile --every 60
    """
    from orchestrator.embedded import database
    from orchestrator.reconcile import reconcile as look_once
    from orchestrator.webhooks import deliver_once
    from stages.errors import RsiError

    settings = terminal.settings()
    out = terminal.console()
    while True:
        try:
            repairs = look_once(settings, database.url(settings))
        except RsiError as error:
            if every is None:
                raise
            print(f"error: {error}", file=sys.stderr, flush=True)  # a server that restarts: tried again
            repairs = ()
        for repair in repairs:
            out.print(f"Cycle {repair.cycle_id}: {repair.before} → {repair.after}. {repair.message}")
        try:
            deliver_once(settings, database.url(settings))
        except RsiError as error:
            if every is None:
                raise
            print(f"error: {error}", file=sys.stderr, flush=True)
        if every is None:
            if not repairs:
                out.print("Nothing to repair.")
            return
        sys.stdout.flush()
        time.sleep(every)
