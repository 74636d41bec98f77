"""`rsi model build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands import terminal

VALIDATION_TASKS = 80

app = typer.Typer(name="model", help="The embedded model.", no_args_is_help=True, rich_markup_mode="markdown")


@app.command()
def build(
    folder: Annotated[Path, typer.Argument(help="New folder to write to.", show_default=False, metavar="DIR")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
    experts: Annotated[
        int, typer.Option(min=0, max=64, help="Experts per layer: a Qwen3-MoE with untied embeddings. 0: dense.")
    ] = 0,
) -> None:
    """Pre-train the tiny Base model from scratch, as the one that ships with the package was (about 5 minutes).

    Deterministic: the same seed on the same machine type, torch build and thread count gives the same digest.

    Example:

        rsi model build ./base --seed 0

        rsi model build ./moe --experts 4
    """
    from stages.errors import ModelError

    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ModelError(f"{folder} exists already. Name a new folder, or remove it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)  # not after minutes of work
    except OSError as error:
        raise ModelError(f"{folder} cannot be made: {error.strerror}. Name another folder.") from error
    from stages.pretrain.build import BuildRecipe, build_base
    from stages.pretrain.choose import choose_base
    from stages.pretrain.train import ModelShape
    from stages.tasks.embedded import embedded_suite
    from stages.tasks.generate import PoolKind

    out, recipe = terminal.console(), BuildRecipe(seed=seed, shape=ModelShape(experts=experts))
    out.print(
        f"Running {recipe.acts + recipe.plans + recipe.follows} scripted episodes in bash (seed {seed}); a minute or two …"
    )
    for line in build_base(folder / "candidates", recipe):
        out.print(line)
    candidates = [folder / "candidates" / f"step-{step}" for step in recipe.save_at]
    validation = embedded_suite(PoolKind.VALIDATION, VALIDATION_TASKS, folder / "suites")
    for line in choose_base(candidates, validation, folder, recipe):
        out.print(line)
    out.print(f"Base is in {folder}; `rsi cycle launch --model {folder}` starts from it.")
