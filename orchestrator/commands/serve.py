"""`rsi serve`, and how a command names a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.commands import terminal

if TYPE_CHECKING:
    from orchestrator import models as m
    from orchestrator.store.facade import Store
    from stages.config import CycleConfig

SHIPPED = "shipped"  # the Base that comes with the package
_NUMBERED = re.compile(r"\d{1,7}(/.+)?")


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Work")(serve)


def serve(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Number, CYCLE/NAME, name, at least 8 digits of a digest, `shipped`, or a model folder.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on. There is no password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port.")] = 8300,
    name: Annotated[
        str | None, typer.Option(help="Model name that clients see.", show_default="the checkpoint's")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="as torch has it")] = None,
) -> None:
    """Serve a model for any harness: SGLang's `/generate` and OpenAI's `/v1/chat/completions`. Ctrl-C stops it.

    Concurrent requests are decoded together, and a conversation finds its cache again.

    Examples:

        rsi serve 3/RPR-2

        rsi serve ./my-model --port 9000 --name mine

        rsi tasks run ./task --agent http://127.0.0.1:8300/v1 --prompt '{instruction}'
    """
    from orchestrator.embedded import ports

    model = named_model(checkpoint)
    ports.require_free(port, service="model server", option="rsi serve --port N", host=host)
    from orchestrator.serve import serve as run

    run(model.folder, host=host, port=port, name=name or model.name, num_threads=threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model folder on this machine. `settings`: its cycle's recipe values, None when it belongs to no cycle."""

    name: str
    folder: Path  # config.json, weights, tokenizer
    settings: dict[str, Any] | None = None

    def config(self) -> CycleConfig:
        """The settings to run it with: its cycle's, the demo's for an embedded model, else the paper's."""
        from orchestrator.recipes import load_recipe, parse_config

        if self.settings is not None:
            return parse_config(self.settings, f"the cycle of {self.name}")
        return load_recipe("demo" if (self.folder / "rsi_prompts.json").exists() else "paper")


def named_model(reference: str, *, folders: bool = True) -> NamedModel:
    """The model of a reference as `rsi serve` takes it; numbers and CYCLE/NAME are checkpoints whatever folders are called.

    Raises ModelError for a folder that is no model, StoreError, CheckpointError or ServiceError for a checkpoint.
    """
    from stages.errors import CheckpointError, ModelError

    if reference == SHIPPED:
        from orchestrator.inputs import shipped_model

        return NamedModel(name="Base", folder=shipped_model())
    path = Path(reference).expanduser()
    if folders and not _NUMBERED.fullmatch(reference) and (path.is_dir() or reference.startswith((".", "/", "~"))):
        return NamedModel(name=path.resolve().name, folder=_model_in(path, ModelError))
    with terminal.opened_store() as store:
        row = _find(store, reference)
        cycle = store.cycles.get(row.cycle_id) if row.cycle_id is not None else None
        settings = dict(cycle.config) if cycle is not None else None
    if not row.path:
        raise CheckpointError(f"checkpoint {row.id} has no folder: it was never saved on this machine")
    return NamedModel(name=row.name, folder=_model_in(Path(row.path), CheckpointError), settings=settings)


def _model_in(path: Path, error: type[Exception]) -> Path:
    if not path.is_dir():
        raise error(f"{path}: no such folder on this machine")
    folder = path / "actor" if (path / "actor").is_dir() else path
    if not (folder / "config.json").exists():
        raise error(f"{folder}: no config.json. Name a Hugging Face model folder, or a checkpoint's.")
    return folder


def _find(store: Store, reference: str) -> m.Checkpoint:
    from orchestrator.commands.checkpoint import find
    from stages.errors import StoreError

    if not reference.isdecimal() and "/" not in reference:
        same = [c for c in store.checkpoints.list(text=reference, limit=200).items if c.name == reference]
        if len(same) == 1:
            return same[0]
        if same:
            names = ", ".join(f"{c.id} (cycle {c.cycle_id or terminal.MISSING})" for c in same)
            raise StoreError(f"{len(same)} checkpoints are called {reference}: {names}. Name one by its number.")
        if len(reference) < 8 or set(reference) - set("0123456789abcdef"):
            raise StoreError(
                f"{reference!r} is neither a folder nor a checkpoint. `rsi checkpoint list` shows checkpoints."
            )
    return find(store, reference)
