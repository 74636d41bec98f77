"""What may overrule what when a verifier's files and the authenticated channel disagree."""

from __future__ import annotations

import json

import pytest

from stages.backends.sandbox.channel import OVERFLOW
from stages.backends.sandbox.verdict import Judgement, VerifierOutput, judge
from stages.domain import CheckSpec, CheckStatus, Verdict

NONCE = "0123456789abcdef" * 2
BOTH = (CheckSpec(id="test_a"), CheckSpec(id="test_b"))


def channel(*, end: int = 0, **statuses: str) -> bytes:
    rows = [{"begin": 1}, *({"id": f"t.py::{n}", "status": s} for n, s in statuses.items()), {"end": end}]
    return "".join(f"{NONCE} {json.dumps(row)}\n" for row in rows).encode()


def ctrf(**statuses: str) -> bytes:
    return json.dumps({"results": {"tests": [{"name": n, "status": s} for n, s in statuses.items()]}}).encode()


def judged(said: bytes, manifest: tuple[CheckSpec, ...] = BOTH, *, rewritten: str = "", **files: bytes) -> Judgement:
    results = {name.replace("_", "."): data for name, data in files.items()}
    output = VerifierOutput(
        exit_code=0, channel=said, nonces=[NONCE], results=results, rewritten={rewritten: 2} if rewritten else {}
    )
    return judge(output, manifest)


def test_a_file_does_not_overrule_the_channel_by_a_tests_short_name() -> None:
    found = judged(channel(test_a="failed", test_b="passed", end=1), ctrf_json=ctrf(test_a="passed"))
    assert found.verdict is Verdict.FAILED
    assert found.checks[0].status is CheckStatus.FAILED
    assert judged(channel(test_a="passed", test_b="passed"), ctrf_json=ctrf(test_a="failed")).verdict is Verdict.PASSED


@pytest.mark.parametrize("name", ["ctrf.json", "reward.txt", "(a folder taken away)"])
def test_rewritten_files_matter_unless_the_channel_answers_for_every_check(name: str) -> None:
    whole, half = channel(test_a="passed", test_b="passed"), channel(test_a="passed")
    files = {"ctrf_json": ctrf(test_b="passed"), "reward_txt": b"1"}
    assert judged(whole, rewritten=name, **files).verdict is Verdict.PASSED
    assert judged(half, **files).verdict is Verdict.PASSED
    for said, manifest in ((half, BOTH), (b"", BOTH), (whole, ())):
        found = judged(said, manifest, rewritten=name, **files)
        assert (found.verdict, found.rewards) == (Verdict.FAILED, {"reward": 0.0})
        assert "result_rewritten" in found.flags


def test_a_channel_with_more_than_can_be_kept_proves_nothing() -> None:
    found = judged(channel(test_a="passed", test_b="passed") + OVERFLOW)
    assert (found.verdict, found.flags) == (Verdict.FAILED, ("forged_report",))


@pytest.mark.parametrize(
    "files",
    [
        {"reward_json": b'{"reward": 1' + b"0" * 400 + b"}"},
        {"reward_json": b'{"reward": 1' + b"0" * 5000 + b"}"},
        {"reward_json": b'{"reward": 1e999}'},
        {"ctrf_json": b'{"results":{"tests":[{"name":"a","status":["passed"]}]}}'},
    ],
)
def test_what_no_number_can_hold_is_no_verdict_and_no_crash(files: dict[str, bytes]) -> None:
    assert judged(b"", (), **files).verdict is Verdict.NONE


def test_halves_of_characters_become_text() -> None:
    odd = b'{"results":{"tests":[{"name":"a\\ud800","status":"failed","message":"\\udfff"}]}}'
    said = f'{NONCE} {{"begin": 1}}\n{NONCE} {{"id": "b\\ud801", "status": "failed"}}\n{NONCE} {{"end": 1}}\n'.encode()
    found = judged(said, (), ctrf_json=odd, reward_json=b'{"\\ud800": 0}')
    for text in (*(c.id + c.message for c in found.checks), *found.rewards):
        assert text.encode()
    assert len(found.checks) == 2
