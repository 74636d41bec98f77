"""What the rules may look at: the task, the source trajectory, the hidden files, the target harness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stages.domain import Finding, LeakPart, Runbook, Severity, Task, Trajectory
from stages.errors import TaskError
from stages.leaks.evidence import Evidence
from stages.leaks.lines import Line, parse
from stages.leaks.words import words

_HIDDEN_FOLDERS = ("tests", "solution")
_MAX_HIDDEN_BYTES = 1_000_000  # of one file; larger ones are data, not text that a runbook could quote


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRules:
    """What the target harness can execute (the compatibility part)."""

    max_lines: int = 40
    max_line_chars: int = 400
    literal_lines: bool = False  # True: every line is a command to be typed (shell harness); False: prose is welcome
    allowed_commands: frozenset[str] | None = None  # None: any
    forbidden: Mapping[str, str] = field(default_factory=dict)  # name -> regular expression of a construct
    interactive: bool = False  # True: full-screen programs can be driven by keystrokes
    done_words: frozenset[str] = frozenset({"done", "exit", "finish", "finished", "submit"})


SHELL_COMMANDS = words("""
    echo touch mkdir mv cp rm cat ls grep wc chmod sed cut sort head tail pwd printf uniq
""")
SHELL_HARNESS = HarnessRules(
    max_lines=12,
    max_line_chars=120,
    literal_lines=True,
    allowed_commands=SHELL_COMMANDS,
    forbidden={
        "command substitution or variable": r"[$`]",
        "parent directory": r"(?:^|[\s/'\"=])\.\.(?:/|\s|$)",
        "path outside the work directory": r"(?:^|[\s>=])[/~]",
        "background job": r"(?<![&>])&(?![&\d])",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewContext:
    """Everything that one review may use. `hidden_texts` and `evidence` must never reach a prompt."""

    task: Task
    source: Trajectory | None = None  # the successful trajectory that the planner saw
    hidden_texts: Mapping[str, str] = field(default_factory=dict)  # "tests/test.sh" -> text
    harness: HarnessRules = field(default_factory=HarnessRules)
    evidence: Evidence = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", Evidence(self.task, self.source, self.hidden_texts))

    @classmethod
    def for_task(
        cls,
        task: Task,
        source: Trajectory | None = None,
        *,
        max_lines: int = 40,
        max_line_chars: int = 400,
        literal_lines: bool = False,
        allowed_commands: frozenset[str] | None = None,
    ) -> ReviewContext:
        """The context of a task on disk, hidden files included. Raises TaskError when the folder has no tests."""
        harness = HarnessRules(
            max_lines=max_lines,
            max_line_chars=max_line_chars,
            literal_lines=literal_lines,
            allowed_commands=allowed_commands,
        )
        return cls(task=task, source=source, hidden_texts=load_hidden_texts(task), harness=harness)

    @property
    def strict(self) -> bool:
        """The harness types every line, so every literal is a value."""
        return self.harness.literal_lines


def load_hidden_texts(task: Task) -> dict[str, str]:
    """Tests and reference solution of a Harbor folder, path relative to its root -> text. Binary files are left out.

    Raises TaskError when the folder has no tests.
    """
    texts: dict[str, str] = {}
    for folder in _HIDDEN_FOLDERS:
        for path in sorted((task.root / folder).rglob("*")):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_HIDDEN_BYTES:
                continue
            data = path.read_bytes()
            if b"\0" not in data[:4096]:
                texts[path.relative_to(task.root).as_posix()] = data.decode("utf-8", "replace")
    if not any(name.startswith("tests/") for name in texts):
        raise TaskError(f"{task.root}: no readable file under tests/. The leak gate needs the verifier's text.")
    return texts


def lines_of(runbook: Runbook, context: ReviewContext) -> list[Line]:
    """Parsed lines; inside a fenced block every line is a command."""
    parsed: list[Line] = []
    fenced = False
    for line in runbook.lines:
        if line.text.strip().startswith("```"):
            fenced = not fenced
            parsed.append(Line(text=line.text, is_shell=False))
        else:
            parsed.append(parse(line.text, shell_only=fenced or context.strict))
    return parsed


def finding(
    part: LeakPart,
    severity: Severity,
    rule: str,
    message: str,
    *,
    line: int | None = None,
    span: tuple[int, int] = (0, 0),
    evidence: str = "",
    source: str = "",
) -> Finding:
    """A finding. `message` is public (a model reviewer sees it); `evidence` and `source` are for people."""
    return Finding(
        part=part,
        severity=severity,
        rule=f"{part.value}.{rule}",
        message=message,
        line=line,
        start=span[0],
        end=span[1],
        evidence=evidence[:400],
        evidence_source=source,
    )
