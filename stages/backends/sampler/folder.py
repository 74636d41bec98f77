"""What a Hugging Face model folder must hold before anything is loaded from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def read_config(model_path: Path) -> Any:
    """The folder's `transformers` config. Raises ModelError naming the file that is missing or broken."""
    if not (model_path / "config.json").is_file():
        raise ModelError(f"{model_path} is no model folder: config.json is missing; point to a Hugging Face folder")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError, KeyError) as e:
        raise ModelError(f"{model_path / 'config.json'} cannot be read: {e}") from e


def require_tokenizer(model_path: Path) -> None:
    """Raises ModelError when the folder has no tokenizer file."""
    if not any((model_path / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{model_path} has no tokenizer (one of {', '.join(TOKENIZER_FILES)}); save the tokenizer into the same folder"
        )
