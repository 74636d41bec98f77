"""The command `rsi`. Errors that a person can mend are printed as one message without a traceback, exit code 2."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands import (
    audit,
    checkpoint,
    compare,
    cycle,
    demo,
    doctor,
    evaluate,
    experiment,
    export,
    import_,
    inbox,
    model,
    production,
    review,
    rootfs,
    serve,
    services,
    suite,
    tasks,
    users,
)
from stages.errors import RsiError

HELP = """Recursive self-improvement of terminal agents: Base → RSR-1 → RPR-1 → RSR-2 → RPR-2.

First time: `rsi doctor` checks this machine, `rsi demo` runs the whole loop on a tiny model and leaves the console open.
Every day: `rsi up`, `rsi cycle launch`, `rsi status`, `rsi down`.
Everything is written under one folder, `.rsi` here, or what --home or RSI_HOME names."""

app = typer.Typer(
    name="rsi",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (demo, doctor, services, evaluate, compare, serve, production, inbox):  # in the order of the help page
    module.register(app)
for group in (cycle, checkpoint, review, suite, tasks, rootfs, import_, export, audit, experiment, model, users):
    app.add_typer(group.app, rich_help_panel="Work")


@app.callback()
def root(
    home: Annotated[
        Path | None,
        typer.Option(help="Folder of this installation.", show_default="$RSI_HOME, else .rsi", metavar="DIR"),
    ] = None,
) -> None:
    if home is not None:
        os.environ["RSI_HOME"] = str(home)


def main() -> None:
    """Entry point. RSI_DEBUG=1 shows the traceback of every error."""
    try:
        app()  # typer itself answers usage errors (2) and Ctrl-C (130)
    except RsiError as error:
        if os.environ.get("RSI_DEBUG"):
            raise
        sys.exit(_complain(str(error)))


def _complain(message: str) -> int:
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    head = "\033[1;31merror:\033[0m" if colour else "error:"
    print(f"{head} {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
