"""One Chromium for all browser tests; each page has a context of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chromium import ARGUMENTS, CHROMIUM


@pytest.fixture(scope="package")  # not the session's: Playwright's event loop must be gone when other tests run theirs
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()
