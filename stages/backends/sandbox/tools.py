"""What verifiers get on a read-only mount at /opt/rsi: this interpreter, pytest, our reporter, a bash nobody can trace.

Decided in the training process, done by the host (`world.build_root`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from stages.backends.sandbox.world import INTERPRETERS

_PACKAGES = (
    "pytest",
    "_pytest",
    "py",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "exceptiongroup",
    "tomli",
    "typing_extensions",
)
_DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli")
_COMMANDS = {"python3": "python3.sh", "python": "python3.sh", "pytest": "pytest.sh", "uvx": "uvx.sh"}
_SHUT_PYTHON = "/logs/python3"  # only on Docker, where agents cannot write into /logs itself
# The image's interpreter once more, where only root can put it and so that its user cannot read it: between the start of a
# readable one and the moment in which the test runner shuts itself off, a program of the agent's could open its memory.
MAKE_SHUT_PYTHON = rf"""
for p in {" ".join(INTERPRETERS)}; do
 [ -x $p ] && cp -L $p {_SHUT_PYTHON} && chmod 0111 {_SHUT_PYTHON} && {_SHUT_PYTHON} -I -c 'import json, os' && exit
done; rm -f {_SHUT_PYTHON}
"""
_INTERPRETER = f"""#!/bin/bash
for p in {" ".join(INTERPRETERS)}; do [ -x $p ] && exec $p "$@"; done
echo "this image has no python3 for its verifier" >&2; exit 127
"""
_HERE = Path(__file__).parent / "verifier_tools"


def world_config() -> dict[str, Any]:
    """`texts`, `binds` and `links` below /opt/rsi for the host's start-up message; `interpreter` for other system files."""
    texts = {f"bin/{name}": (_HERE / file).read_text() for name, file in _COMMANDS.items()}
    texts["lib/rsi_pytest.py"] = (_HERE / "rsi_pytest.py").read_text()
    binds: dict[str, str] = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue  # older interpreters need some of them, newer ones none
        if spec.submodule_search_locations:
            binds[f"lib/{name}"] = str(Path(spec.origin).parent)
        else:
            texts[f"lib/{name}.py"] = Path(spec.origin).read_text()
    for distribution in _DISTRIBUTIONS:  # some of them ask for their own version at run time
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            texts[f"lib/{distribution}-{version}.dist-info/METADATA"] = text
    links: dict[str, str] = {}
    prefix = os.path.realpath(sys.base_prefix)
    executable = f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if prefix != "/usr" and os.path.exists(f"{prefix}/{executable}"):
        binds["python"] = prefix
        links["interpreter"] = f"/opt/rsi/python/{executable}"
        library = sysconfig.get_config_var("INSTSONAME")
        if sysconfig.get_config_var("Py_ENABLE_SHARED") and library:
            links[f"ld/{library}"] = f"/opt/rsi/python/lib/{library}"
    else:
        links["interpreter"] = f"/usr/{executable}"
    return {"texts": texts, "binds": binds, "links": links, "interpreter": _INTERPRETER}


def portable_tools() -> list[tuple[str, int, bytes]]:
    """The same for an image whose interpreter we do not know: files to lie below /opt/rsi, pytest's sources included."""
    config = world_config()
    entries = [(name, 0o755, text.encode()) for name, text in config["texts"].items()]
    entries.append(("interpreter", 0o755, _INTERPRETER.replace("for p in ", f"for p in {_SHUT_PYTHON} ", 1).encode()))
    for name, source in config["binds"].items():
        if name.startswith("lib/"):
            for path in sorted(Path(source).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    entries.append((f"{name}/{path.relative_to(source)}", 0o644, path.read_bytes()))
    return entries
