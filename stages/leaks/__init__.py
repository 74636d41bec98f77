"""The leak gate's rules: pattern, artifact and compatibility (spec §2.1, item 3), in one registry."""

from __future__ import annotations

from collections.abc import Callable

from stages.domain import Finding, LeakPart, Runbook, Severity
from stages.leaks import artifact, compatibility, pattern
from stages.leaks.context import SHELL_COMMANDS, SHELL_HARNESS, HarnessRules, ReviewContext, load_hidden_texts

Rule = Callable[[Runbook, ReviewContext], list[Finding]]

REGISTRY: dict[LeakPart, tuple[Rule, ...]] = {
    LeakPart.PATTERN: pattern.RULES,
    LeakPart.ARTIFACT: artifact.RULES,
    LeakPart.COMPATIBILITY: compatibility.RULES,
}


def findings(runbook: Runbook, context: ReviewContext) -> tuple[Finding, ...]:
    """What every rule says about one runbook: hard first, then in line order. Pure."""
    found = [f for rules in REGISTRY.values() for rule in rules for f in rule(runbook, context)]
    return tuple(
        sorted(found, key=lambda f: (f.severity is not Severity.HARD, -1 if f.line is None else f.line, f.start))
    )


__all__ = [
    "REGISTRY",
    "SHELL_COMMANDS",
    "SHELL_HARNESS",
    "HarnessRules",
    "ReviewContext",
    "Rule",
    "findings",
    "load_hidden_texts",
]
