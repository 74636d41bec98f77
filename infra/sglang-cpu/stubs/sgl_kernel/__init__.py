"""Stands in for SGLang's kernel package, whose CPU build is not published.

Without AMX SGLang takes its own native torch code, so names have to resolve and two operators have to compute; whatever
else is called raises and names itself.
"""

import os
from typing import Any

from . import operators

__version__ = "0.4.10"
__path__ = [os.path.dirname(__file__)]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not part of the CPU stand-in")

    missing.__name__ = name
    return getattr(operators, name, missing)
