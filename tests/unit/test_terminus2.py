"""The Terminus-2 protocol without a sandbox: parser, wording, output cap, compaction, and its segments in the ledger."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stages.backends.protocols import GenerateAnswer
from stages.chat import Chat
from stages.config import RolloutConfig
from stages.harness.terminus2.compaction import KINDS, Compaction
from stages.harness.terminus2.parser import LONGEST_S, Keys, Parsed, parse_reply
from stages.harness.terminus2.prompt import after_commands, after_error, first_message, limited, runbook_block
from stages.tokens import Ledger
from tests.scripted import byte_chat, keys
from tests.unit.test_tokens import trajectory as of_ledger


def test_a_flawless_reply() -> None:
    parsed = parse_reply(keys("ls -la\n", "C-c", done=True))
    assert parsed.commands == (Keys(keystrokes="ls -la\n", duration_s=0.1), Keys(keystrokes="C-c", duration_s=0.1))
    assert (parsed.task_complete, parsed.feedback) == (True, "")


@pytest.mark.parametrize(
    ("reply", "commands", "complete", "said"),
    [
        ("Sure {ok}! " + keys("ls\n") + " bye", 1, False, "Extracted JSON from mixed content"),
        ("```json\n" + keys("ls\n") + "\n```", 1, False, "Extra text detected before JSON object"),
        (keys("ls\n")[:-24], 1, False, "adding missing closing"),
        (keys("ls\n").replace('"duration": 0.1', '"duration": "long"'), 1, False, "Invalid duration"),
        (keys("ls\n").replace(', "duration": 0.1', ""), 1, False, "Missing duration"),
        (keys("ls\n").replace('"duration"', '"x": 1, "duration"'), 1, False, "Unknown fields: x"),
        (keys("a", "b\n"), 2, False, "Command 1 should end with newline"),
        ('{"plan": "p", "analysis": "a", "commands": []}', 0, False, "wrong order"),
        (keys(done=True).replace("true", '"yes"'), 0, True, ""),
        (keys(done=True).replace("[]", '[{"duration": 1}]'), 0, True, "missing required 'keystrokes'"),
        (keys(b"a\\u0000b\n".decode("unicode_escape")), 1, False, "cannot be typed"),
    ],
)  # fmt: skip
def test_tolerated_with_a_warning(reply: str, commands: int, complete: bool, said: str) -> None:
    parsed = parse_reply(reply)
    assert (len(parsed.commands), parsed.task_complete, parsed.error) == (commands, complete, "")
    assert said in parsed.feedback
    if said:
        assert said in after_commands(parsed, "screen")
        assert after_commands(parsed, "screen").endswith("screen")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("I am done.", "No valid JSON found"),
        ("", "No valid JSON found"),
        ('{"analysis": "a"}', "Missing required fields: plan, commands"),
        ('{"analysis": 1,}', "Invalid JSON"),
        (keys("x").replace("[", '"').replace("]", '"'), "Invalid JSON"),
        ('{"analysis": "", "plan": "", "commands": "ls"}', "must be an array"),
        ('{"analysis": "", "plan": "", "commands": ["ls"]}', "Command 1 must be an object"),
        ('{"analysis": "", "plan": "", "commands": [{"keystrokes": 3}]}', "must be a string"),
        ('{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "rm -rf unfini', "No valid JSON found"),
        ("{" * 3000, "Invalid JSON"),
        ('{"a":' + "[" * 100_000, "Invalid JSON"),
    ],
)
def test_an_error_runs_nothing_and_is_told(reply: str, said: str) -> None:
    parsed = parse_reply(reply)
    assert (parsed.commands, parsed.task_complete) == ((), False)
    assert parsed.error
    assert said in after_error(parsed) or "No valid JSON found" in parsed.error
    assert "proper JSON response" in after_error(parsed)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
FIELD = st.sampled_from(["analysis", "plan", "commands", "task_complete"])
COMMAND = st.dictionaries(st.sampled_from(["keystrokes", "duration", "x"]), JSON, max_size=3) | JSON
REPLY = st.dictionaries(FIELD, JSON | st.lists(COMMAND, max_size=4), max_size=4).map(json.dumps)


@given(st.text() | st.text('{}[]",:\\ \nab01'), REPLY, st.integers(0, 200))
def test_no_text_is_too_odd(noise: str, reply: str, cut: int) -> None:
    for text in (noise, reply, reply[: len(reply) - cut], noise + reply, reply + noise, noise + reply[cut:]):
        parsed = parse_reply(text)
        assert isinstance(parsed, Parsed)
        if parsed.error:
            assert not parsed.commands
            assert not parsed.task_complete
        for command in parsed.commands:
            assert 0 <= command.duration_s <= LONGEST_S
            assert "\0" not in command.keystrokes
            command.keystrokes.encode()


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.floats(0, 60)),
        max_size=5,
    ),
    st.booleans(),
)
def test_what_was_meant_is_what_is_read(rows: list[tuple[str, float]], done: bool) -> None:
    reply = {
        "analysis": "{", "plan": '"}', "task_complete": done,
        "commands": [{"keystrokes": k, "duration": d} for k, d in rows],
    }  # fmt: skip
    parsed = parse_reply(json.dumps(reply))
    assert [(c.keystrokes, c.duration_s) for c in parsed.commands] == rows
    assert parsed.task_complete is done


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("1" + "0" * 400, 60.0), ("1e999", 60.0), ("Infinity", 60.0), ("-Infinity", 0.0), ("-5", 0.0), ("NaN", 1.0), ("true", 1.0)],
)  # fmt: skip
def test_every_duration_is_a_wait_of_at_most_a_minute(written: str, seconds: float) -> None:
    reply = keys("ls\n").replace('"duration": 0.1', f'"duration": {written}')
    assert [c.duration_s for c in parse_reply(reply).commands] == [seconds]


@pytest.mark.parametrize("bomb", ["[" * 50_000, '{"a":' * 50_000, '{"analysis":' + "[" * 20_000 + "]" * 20_000 + "}"])
def test_deep_nesting_is_an_error_like_another(bomb: str) -> None:
    assert parse_reply(bomb).error
    assert len(parse_reply(bomb).feedback) < 2000


def test_thousands_of_warnings_do_not_fill_the_context() -> None:
    commands = ",".join(['{"keystrokes":"", "' + "x" * 300 + '":1}'] * 1000)
    parsed = parse_reply('{"analysis":"","plan":"","commands":[' + commands + "]}")
    assert len(parsed.commands) == 1000
    assert "more" in parsed.feedback
    assert len(parsed.feedback) < 6000


@given(st.text(max_size=300), st.integers(2, 60))
def test_output_keeps_head_and_tail(text: str, limit: int) -> None:
    shown = limited(text, limit)
    if len(text.encode()) <= limit:
        assert shown == text
        return
    head, _, tail = shown.partition("\n[... output limited to")
    tail = tail.partition("omitted ...]\n")[2]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head.encode()) + len(tail.encode()) <= limit


def test_no_text_smuggles_a_placeholder_into_the_first_message() -> None:
    text = first_message("do {screen} {runbook}", "$ {instruction}", ["cat {instruction}"])
    assert "do {screen} {runbook}" in text
    assert "$ {instruction}" in text
    assert text.replace(runbook_block(["cat {instruction}"]), "") == first_message(
        "do {screen} {runbook}", "$ {instruction}"
    )


# --------------------------------------------------------------------------- compaction

TALK = [{"role": r, "content": c} for r, c in [("user", "first"), ("assistant", "r1"), ("user", "o1"), ("assistant", "r2"), ("user", "o2")]]  # fmt: skip


def test_three_sub_calls_make_a_shorter_conversation() -> None:
    c = Compaction(TALK, instruction="TASK {summary}", screen="SCREEN")
    asked = {}
    for kind in KINDS:
        assert c.kind == kind
        asked[kind] = c.prompt()
        c.answer(f"the {kind} {{screen}}")
    assert c.done
    summary, questions, answers = asked["summary"], asked["questions"], asked["answers"]
    assert [m["role"] for m in summary] == ["user", "assistant"] * 2 + [
        "user"
    ]  # alternates: o2 and the request are one
    assert summary[-1]["content"].startswith("o2\n\n")
    assert [m["role"] for m in questions] == ["user"]
    assert questions[0]["content"].count("the summary {screen}") == 1
    assert "SCREEN" in questions[0]["content"]
    assert answers[:5] == summary
    assert "the questions" in answers[-1]["content"]
    first, asks, last = c.messages()
    assert first["content"].startswith("first\n\n")
    assert asks == {"role": "assistant", "content": "the questions {screen}"}
    assert "the answers {screen}" in last["content"]


def test_a_prompt_that_does_not_fit_loses_its_newest_exchanges_only() -> None:
    c = Compaction(TALK, instruction="t", screen="s")
    assert c.shrink()
    assert [m["content"] for m in c.prompt()][:2] == ["first", "r1"]
    assert c.shrink()
    assert not c.shrink()
    assert c.prompt()[0]["content"].startswith("first\n\n")


def test_when_it_is_due() -> None:
    assert RolloutConfig().compaction_at(262_144) == 32_000
    assert RolloutConfig(compaction="off").compaction_at(1000) is None
    # fewer than 8,000 of 96,000 tokens left
    assert RolloutConfig(compaction="free_below=8000").compaction_at(262_144) == 88_001
    for wrong in ("accumulated", "accumulated=0", "free_below=-1", "sometimes"):
        with pytest.raises(ValidationError, match="compaction"):
            RolloutConfig(compaction=wrong)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return byte_chat(tmp_path_factory.mktemp("chat"))


def said(chat: Chat, text: str) -> GenerateAnswer:
    ids = (*chat.encode(text), *chat.stop_token_ids)
    return GenerateAnswer(
        rid="r", output_ids=ids, output_token_logprobs=(-0.5,) * len(ids), finish_reason="stop", prompt_tokens=1,
        cached_tokens=0, weight_version="v1",
    )  # fmt: skip


@pytest.mark.parametrize("trained", [False, True])
def test_sub_calls_are_segments_of_their_own(chat: Chat, trained: bool) -> None:
    book = Ledger(chat)
    book.start_segment("p")
    book.add_sample(said(chat, "one"), 0)
    book.extend("pone<|im_end|>seen")
    book.close_segment()
    for n, kind in enumerate(KINDS):
        book.add_subcall(kind, chat.encode(f"ask {kind}"), said(chat, kind), n + 1 if trained else None)
    book.start_segment("q")
    book.add_sample(said(chat, "two"), 4)
    whole = of_ledger(book)
    assert [s.kind for s in whole.segments] == ["policy", *KINDS, "policy"]
    assert chat.decode(whole.segments[0].tokens.tolist()).endswith("seen")  # the state that was summarised
    for n, segment in enumerate(whole.segments):
        own = segment.turn_ids[segment.loss_mask]
        assert own.tolist() == ([n] * len(own))
        assert len(own) == (
            0 if segment.kind != "policy" and not trained else len(chat.encode(["one", *KINDS, "two"][n])) + 1
        )
        assert not segment.rollout_log_probs[~segment.loss_mask].any()
    assert drift(whole) == 0
    # a changed sub-call is drift, whether it is trained on or not
    tokens = whole.segments[2].tokens.copy()
    tokens[-2] += 1
    assert drift(whole, tokens=(2, tokens)) == 1
    if not trained:
        mask = whole.segments[2].loss_mask.copy()
        mask[-1] = True
        assert drift(whole, mask=(2, mask)) == 1


def drift(whole, *, tokens: tuple[int, np.ndarray] | None = None, mask: tuple[int, np.ndarray] | None = None) -> int:
    from dataclasses import replace

    from stages.tokens import count_drift

    segments = list(whole.segments)
    if tokens:
        segments[tokens[0]] = replace(segments[tokens[0]], tokens=tokens[1])
    if mask:
        segments[mask[0]] = replace(segments[mask[0]], loss_mask=mask[1])
    return count_drift(replace(whole, segments=tuple(segments)))


def test_the_codec_says_anything(chat: Chat, tmp_path: Path) -> None:
    text = 'ünïcode {"a": "\\n"} → <x>\n\t'
    assert chat.decode(chat.encode(text)) == text
    assert Counter(chat.encode("aab"))[chat.encode("a")[0]] == 2
