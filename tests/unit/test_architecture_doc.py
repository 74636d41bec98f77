"""ARCHITECTURE.md tells the same story as the tree: every module with the first line of its own docstring."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("stages", "orchestrator", "webui")


def rows() -> list[str]:
    """One line per module, as ARCHITECTURE.md holds it. `python tests/unit/test_architecture_doc.py` prints them."""
    out = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if path.name == "__init__.py" and not doc:
                continue
            assert doc, f"{path.relative_to(ROOT)} has no docstring: say in one line what it is for"
            out.append(f"`{path.relative_to(ROOT).as_posix()}`: {' '.join(doc.split(chr(10) * 2)[0].split())}")
    return out


def test_every_module_is_listed_with_what_it_says_of_itself() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    listed = [line.removeprefix("* ") for line in text.splitlines() if line.startswith("* `")]
    expected = rows()
    missing = sorted(set(expected) - set(listed))
    gone = sorted(set(listed) - set(expected))
    assert not missing, "add to ARCHITECTURE.md:\n" + "\n".join(missing)
    assert not gone, "no longer true in ARCHITECTURE.md:\n" + "\n".join(gone)


if __name__ == "__main__":
    print("\n".join(f"* {row}" for row in rows()))
