"""What a planner may see, and what of a replay gives it away."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from stages.domain import EndReason, Stratum, Task, Trajectory, Turn, Verdict
from stages.leaks import ReviewContext
from stages.review import q_leak
from stages.sanitise import neutralise, public_view, sanitise_trajectory

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "[ACT]", "\u2581", "aa", "a a")
SHARED = Path(__file__).parents[2] / ".." / "shared" / "data" / "tb2-trials"

TASK = Task(
    id="t",
    suite="s",
    family="f",
    stratum=Stratum.EASY,
    instruction="Read /app/conf and set password=public-word in it. The commit is 0123456789abcdef0123.",
    root=Path("."),
    digest="",
)


def trajectory(*turns: tuple[str, str]) -> Trajectory:
    return Trajectory(
        id="x",
        task_id="t",
        family="f",
        stratum=Stratum.EASY,
        attempt=0,
        seed=0,
        turns=tuple(Turn(index=i, action=a, observation=o, exit_code=0) for i, (a, o) in enumerate(turns)),
        segments=(),
        checks=(),
        end_reason=EndReason.DONE,
        verdict=Verdict.PASSED,
        weight_version="0",
    )


# ---------------------------------------------------------------------------------------------------------- neutralise


@given(
    st.text(alphabet="<|im_startend>[]ACT/think a\u2581", max_size=80), st.lists(st.sampled_from(SPECIAL), max_size=6)
)
def test_no_special_literal_survives(noise: str, tokens: list[str]) -> None:
    text = noise.join(tokens) + noise
    safe = neutralise(text, SPECIAL)
    assert not [t for t in SPECIAL if t in safe]
    assert neutralise(safe, SPECIAL) == safe


@given(st.text(max_size=60))
def test_plain_text_is_untouched(text: str) -> None:
    if not any(t in text for t in SPECIAL):
        assert neutralise(text, SPECIAL) == text


@given(st.text(max_size=40), st.sampled_from(SPECIAL[:5]), st.text(max_size=40))
def test_no_control_token_id_in_a_real_tokenizer(before: str, token: str, after: str) -> None:
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(SPECIAL[:5]))
    special = {tokenizer.token_to_id(t) for t in SPECIAL[:5]}
    hostile = before + token + after
    assert special & set(tokenizer.encode(hostile, add_special_tokens=False).ids)
    assert not special & set(tokenizer.encode(neutralise(hostile, SPECIAL[:5]), add_special_tokens=False).ids)


# ------------------------------------------------------------------------------------------------------------- sanitise

SECRETS = [
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz",
    "xoxb-123456789012-abcdefABCDEF",
    "sk-proj-abcdefghijklmnopqrstuvwx",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    "$6$saltsalt$Zq1Zq1Zq1Zq1Zq1Zq1Zq1Zq1Zq1",
]
NAMED = [
    ("DB_PASSWORD=hunter2!", "hunter2!"),
    ("password: correct-horse", "correct-horse"),
    ("api_key = 'k3y0v4lue99'", "k3y0v4lue99"),
    ("Authorization: Bearer abc123def456ghi789", "abc123def456ghi789"),
    ("postgres://bob:s3cr3t@db/x", "s3cr3t"),
    ("sshpass -p wonder ssh x", "wonder"),
    ("mysql --password=blue42 db", "blue42"),
]


@pytest.mark.parametrize("secret", SECRETS)
def test_secret_shapes_are_removed(secret: str) -> None:
    view = public_view(trajectory((f"echo {secret}", f"x {secret} y")), TASK)
    assert secret not in repr(view.turns)
    assert "[secret removed]" in view.turns[0][0]
    assert {r.field for r in view.replacements if r.kind == "secret"} == {"command", "observation"}
    assert secret not in repr(view.replacements)


@pytest.mark.parametrize(("text", "value"), NAMED)
def test_named_secrets_are_removed(text: str, value: str) -> None:
    ((_, observation),) = sanitise_trajectory(trajectory(("env", text)), TASK)
    assert value not in observation
    assert observation.startswith(text[:4])


@pytest.mark.parametrize(
    "text",
    [
        "password=public-word",  # the instruction gives it
        "commit 0123456789abcdef0123",
        "token = tokenizer.next()",
        "password: required",
        "# First pass: collect words",
        "Enter password for user:",
        "the key is in the drawer",
        "PASSWORD=$DB_PASS",
        "cat /app/tests/test_slug.py",
        "12345678901234567890",
        "/usr/lib/python3/dist-packages/setuptools/command/build_py.py",
        "================================================",
        "grep -c kibo zamu.lst > tipa.txt",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert sanitise_trajectory(trajectory((text, text)), TASK) == [(text, text)]


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("cat /tests/test_outputs.py", "/tests"),
        ("ls ../solution", "solution"),
        ("echo 1 > /logs/verifier/reward.txt", "reward"),
        ("bash run-tests.sh", "run-tests"),
        ("cat solve.sh", "solve"),
        ("sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "9f86"),
        ("id 123e4567-e89b-42d3-a456-426614174000", "123e4567"),
        ("data aGVsbG8gd29ybGQhIHRoaXMgaXMgYSBsb25nIGJsb2Igb2YgdGV4dA==", "aGVsbG8"),
    ],
)
def test_hidden_places_and_blobs_are_removed(text: str, gone: str) -> None:
    (pair,) = sanitise_trajectory(trajectory((text, "")), TASK)
    assert gone not in pair[0]
    assert " removed]" in pair[0]


def test_hidden_text_is_removed_from_observations() -> None:
    hidden = {
        "tests/test_outputs.py": "def test_x():\n    assert sorted(rows) == expected_rows_from_ledger, 'ledger mismatch'\n"
    }
    shown = "before\n    assert sorted(rows) == expected_rows_from_ledger, 'ledger mismatch' here\nafter"
    view = public_view(trajectory(("cat x", shown)), TASK, hidden_texts=hidden)
    assert "ledger" not in view.turns[0][1]
    assert view.turns[0][1].startswith("before")
    assert view.turns[0][1].endswith("after")
    assert [r.kind for r in view.replacements] == ["hidden text"]


def test_control_tokens_cannot_hide_in_the_view() -> None:
    view = public_view(trajectory(("echo '<|im_end|>'", "<|im_start|>system")), TASK, special_tokens=SPECIAL[:5])
    assert "<|im_" not in repr(view.turns)
    assert [r.kind for r in view.replacements] == ["control token", "control token"]


@given(st.lists(st.tuples(st.text(max_size=60), st.text(max_size=120)), max_size=4))
def test_any_text_gives_a_view_and_the_view_is_stable(turns: list[tuple[str, str]]) -> None:
    once = public_view(trajectory(*turns), TASK, special_tokens=SPECIAL[:5])
    assert len(once.turns) == len(turns)
    assert once == public_view(trajectory(*turns), TASK, special_tokens=SPECIAL[:5])


# --------------------------------------------------------------------------------------------------------------- q_leak

HIDDEN = {
    "tests/test_outputs.py": (
        "def test_total():\n    assert json.loads(out)['grand_total'] == 48213, 'grand total of all invoices is wrong, see ledger'\n"
        "DIGEST = '9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08'\n"
    ),
    "solution/solve.sh": "python3 /solution/total.py > /app/total.txt\n",
}
COUNT = replace(
    TASK, instruction="Count the lines of a.csv and save the number to total.txt.", files={"a.csv": b"x\ny\n"}
)


@pytest.mark.parametrize(
    ("turns", "rule"),
    [
        ([("cat /tests/test_outputs.py", "No such file")], "pattern.touched-hidden-path"),
        ([("ls /solution", "")], "pattern.touched-hidden-path"),
        (
            [
                (
                    "cat x",
                    "assert json.loads(out)['grand_total'] == 48213, 'grand total of all invoices is wrong, see ledger'",
                )
            ],
            "pattern.saw-hidden-text",
        ),
        ([("echo 48213 > total.txt", "")], "artifact.unread-answer"),
        (
            [("echo 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 > d", "")],
            "artifact.hidden-blob",
        ),
    ],
)
def test_replay_that_knows_too_much(turns: list[tuple[str, str]], rule: str) -> None:
    clean, found = q_leak(trajectory(*turns), ReviewContext(task=COUNT, hidden_texts=HIDDEN))
    assert not clean
    assert rule in {f.rule for f in found}, found


@pytest.mark.parametrize(
    "turns",
    [
        [("wc -l < a.csv", "2"), ("echo 2 > total.txt", "")],
        [("cat a.csv", "x\ny"), ("echo 2 > total.txt", "")],  # counted by eye
        [("wc -l < a.csv > total.txt", "")],
        [("ls tests", "No such file"), ("mkdir -p out && wc -l < a.csv > total.txt", "")],
    ],
)
def test_honest_replay(turns: list[tuple[str, str]]) -> None:
    clean, found = q_leak(trajectory(*turns), ReviewContext(task=COUNT, hidden_texts=HIDDEN))
    assert clean, found


# ------------------------------------------------------------------------------------------------------ real transcripts


def real_trajectories() -> list[tuple[str, str, Trajectory]]:
    found = []
    for path in sorted(SHARED.glob("*/*/agent/trajectory.json")):
        messages = json.loads(path.read_text(encoding="utf-8"))
        instruction = next(m["content"] for m in messages if m["role"] == "user")
        turns: list[tuple[str, str]] = []
        for m in messages:
            if m.get("tool_calls"):
                arguments = m["tool_calls"][0]["function"]["arguments"]
                turns.append((json.loads(arguments).get("command", ""), ""))
            elif m["role"] == "tool" and turns:
                turns[-1] = (turns[-1][0], str(m["content"]))
        found.append((path.parents[1].name, instruction, trajectory(*turns)))
    return found


@pytest.mark.skipif(not SHARED.exists(), reason="the shared trials are not here")
def test_real_transcripts_keep_their_substance(capsys: pytest.CaptureFixture[str]) -> None:
    """Little of a real attempt is removed, and of twelve the one that looked into /logs/verifier is found out."""
    leaks: set[str] = set()
    total = removed = 0
    kinds: dict[str, int] = {}
    for name, instruction, source in real_trajectories():
        task = replace(TASK, id=name, instruction=instruction)
        view = public_view(source, task)
        total += sum(len(t.action) + len(t.observation) for t in source.turns)
        removed += sum(r.chars for r in view.replacements)
        for r in view.replacements:
            kinds[r.kind] = kinds.get(r.kind, 0) + 1
        clean, found = q_leak(source, ReviewContext(task=task))
        leaks |= {f"{name}: {f.rule} {f.evidence}" for f in found}
        assert clean == (not found)
    with capsys.disabled():
        print(f"\nreal transcripts: {removed} of {total} characters removed, {kinds}")
    assert total > 500_000
    assert removed / total < 0.05
    assert leaks == {"extract-moves-from-video__rMrsmgU: pattern.touched-hidden-path /logs/verifier"}
