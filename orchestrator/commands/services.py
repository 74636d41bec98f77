"""`rsi up`, `down`, `status`, `worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands import terminal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from orchestrator.embedded.state import Published, ServiceStatus
    from orchestrator.settings import Settings


def register(app: typer.Typer) -> None:
    for command in (up, down, status, worker):
        app.command(rich_help_panel="Services")(command)


def up(
    console_port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="N", help="Port of the console.", show_default="8400")
    ] = None,
    prefect_port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="N", help="Port of the Prefect server.", show_default="4310")
    ] = None,
    console: Annotated[bool, typer.Option("--console/--no-console", help="Start the console.")] = True,
    worker: Annotated[bool, typer.Option("--worker/--no-worker", help="Start a worker for the pool `cpu`.")] = True,
) -> None:
    """Start everything in the background: database, Prefect server, worker, console.

    Safe to repeat: a second `rsi up` says that it is up. The database is an embedded Postgres under --home unless
    DATABASE_URL names another. Logs are in `logs/` under --home.

    Examples:

        rsi up

        rsi up --console-port 9000

        DATABASE_URL=postgresql://me@db/rsi rsi up --no-worker
    """
    from orchestrator.embedded import control

    settings = terminal.settings()
    ports = {"console_port": console_port, "prefect_port": prefect_port}
    settings = settings.model_copy(update={name: port for name, port in ports.items() if port})
    out = terminal.console()
    with _Watcher() as watcher:
        result = control.up(settings, console=console, worker=worker, watch=watcher.see)
    if result.already:
        out.print(f"Already up in {settings.home} (supervisor pid {result.published.pid}).")
    else:
        out.print(f"Up in {settings.home}.")
    for service in result.published.services:
        if service.url.startswith("http"):
            out.print(f"  {service.name:<10} {service.url}")
    if any(service.name == "console" for service in result.published.services):
        from orchestrator.accounts import sign_in_hint

        with terminal.opened_store() as store:
            out.print(sign_in_hint(store, terminal.settings()))
    out.print("`rsi status` shows more, `rsi down` stops everything.")


def down() -> None:
    """Stop everything of this installation and check that nothing is left.

    Running cycles are interrupted at once; nothing that was finished is lost, and `rsi cycle resume` continues them
    after the next `rsi up`. Works after a crash of the supervisor, too.

    Example:

        rsi down
    """
    from orchestrator.embedded import control

    settings = terminal.settings()
    with _Watcher() as watcher:
        stopped = control.down(settings, watch=watcher.see)
    where = f"in {settings.home}"
    terminal.console().print(
        f"Stopped; nothing is left running {where}." if stopped else f"Nothing was running {where}."
    )


def status(
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show the services, their health and memory, and the cycles that are at work.

    Exit code 0 when every service is ready, 1 otherwise.

    Examples:

        rsi status

        rsi status --json
    """
    from dataclasses import asdict

    from orchestrator.embedded import control
    from orchestrator.embedded.state import ServiceState

    settings = terminal.settings()
    published = control.look(settings)
    out = terminal.console()
    ready = published is not None and all(s.state is ServiceState.READY for s in published.services)
    if json:
        import json as codec

        memory = {s.name: _memory(s) for s in published.services} if published else {}
        document = {"home": str(settings.home), "up": ready, **(asdict(published) if published else {})}
        out.print_json(codec.dumps({**document, "memory_mb": memory}))
    elif published is None:
        out.print(f"Nothing is running in {settings.home}. Start it with `rsi up`.")
    else:
        _print_services(settings, published)
        _print_cycles(settings)
    raise typer.Exit(0 if ready else 1)


def worker(
    pool: Annotated[str, typer.Option(help="Work pool: cpu or gpu.")] = "cpu",
    name: Annotated[str | None, typer.Option(help="Name in Prefect's list.", show_default="<host>-<pool>")] = None,
    gpu_class: Annotated[str, typer.Option(help="Take cycles of this GPU class only.", show_default="all")] = "",
    health_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="N", help="Answer /health there, for container platforms."),
    ] = None,
) -> None:
    """Run a worker in the foreground, for a second pool or a second machine.

    `rsi up` already runs one for the pool `cpu`. On another machine set DATABASE_URL, RSI_PREFECT_API_URL,
    RSI_PREFECT_AUTH and RSI_ARTIFACT_URL to those of the first.

    Example:

        rsi worker --pool gpu

        rsi worker --pool gpu --gpu-class h100
    """
    from orchestrator import workers

    workers.run_worker(pool, name=name, gpu_class=gpu_class, health_port=health_port, settings=terminal.settings())


# --------------------------------------------------------------------------- output


class _Watcher:
    """Shows a start or stop: a live table on a terminal, one line per change elsewhere."""

    def __enter__(self) -> _Watcher:
        from rich.live import Live

        self._seen: dict[str, str] = {}
        self._out = terminal.console()
        self._live = Live(console=self._out, transient=True, refresh_per_second=8) if self._out.is_terminal else None
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def see(self, published: Published) -> None:
        if self._live:
            self._live.update(_rows(published))
            return
        for service in published.services:
            if self._seen.get(service.name) != service.state and service.state != "waiting":
                self._seen[service.name] = service.state
                self._out.print(f"  {service.name:<10} {service.state}")


def _rows(published: Published) -> RenderableType:
    from rich.spinner import Spinner
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for service in published.services:
        done = service.state in {"ready", "stopped"}
        mark: RenderableType = _mark(service) if done else Spinner("dots")
        grid.add_row("", mark, service.name, f"{service.state}", terminal.age(service.since), service.message)
    return grid


def _mark(service: ServiceStatus) -> Text:
    from rich.text import Text

    marks = {"ready": Text("✓", style="green"), "stopped": Text("■"), "waiting": Text("…")}
    return marks.get(service.state, Text("!", style="yellow"))


def _print_services(settings: Settings, published: Published) -> None:
    from orchestrator.embedded.processes import memory_mb

    out = terminal.console()
    out.print(
        f"{settings.home}: supervisor pid {published.pid}, {published.phase}, for {terminal.age(published.started_at)}\n"
    )
    rows = terminal.table(
        "", "Service", "State", "Pid", "Where", "Memory", "Restarts", "For", right=("Pid", "Memory", "Restarts")
    )
    total = memory_mb(published.pid, descendants=False) or 0.0
    for service in published.services:
        memory = _memory(service)
        total += memory or 0.0
        rows.add_row(
            _mark(service),
            service.name,
            service.state,
            str(service.pid or terminal.MISSING),
            service.url or terminal.MISSING,
            terminal.megabytes(memory),
            str(service.restarts),
            terminal.age(service.since),
        )
    out.print(rows)
    out.print(f"\nMemory in all: {terminal.megabytes(total)} (a page that several processes share is counted once)")
    for service in published.services:
        if service.message:
            out.print(f"{service.name}: {service.message}")


def _memory(service: ServiceStatus) -> float | None:
    from orchestrator.embedded.processes import memory_mb

    return memory_mb(service.pid) if service.pid else None


def _print_cycles(settings: Settings) -> None:
    from orchestrator.commands.cycle_view import active_table
    from stages.errors import RsiError

    out = terminal.console()
    try:
        with terminal.opened_store() as store:
            out.print()
            out.print(active_table(store) or "No cycle is at work. Start one with `rsi cycle launch`.")
    except RsiError as error:
        out.print(f"Cycles cannot be shown: {error}")
