"""The TITO ledger: four boundary outcomes, and drift that is 0 or refused (spec §6.1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.alarms import alarms
from stages.backends.protocols import GenerateAnswer
from stages.certificate import certify
from stages.domain import Boundary, EndReason, Stratum, Trajectory, Verdict
from stages.errors import DriftError
from stages.tokens import Ledger, count_drift, require_no_drift

# A greedy codec whose boundaries really drift: "ab" is one token, yet a model may sample "a" then "b".
VOCAB = ["<end>", "<act>", " ", "\n", "ab", "a", "b", "c", "d", "cd"]


class GreedyCodec:
    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        order = sorted(range(len(VOCAB)), key=lambda i: -len(VOCAB[i]))
        while at < len(text):
            token = next(i for i in order if text.startswith(VOCAB[i], at))
            ids.append(token)
            at += len(VOCAB[token])
        return ids

    def decode(self, ids) -> str:
        return "".join(VOCAB[i] for i in ids)

    def is_blank(self, token: int) -> bool:
        return token in (0, 1, 2, 3)


def answer(*tokens: str) -> GenerateAnswer:
    ids = tuple(VOCAB.index(t) for t in tokens)
    return GenerateAnswer(
        rid="r",
        output_ids=ids,
        output_token_logprobs=tuple(-0.5 for _ in ids),
        finish_reason="stop",
        prompt_tokens=1,
        cached_tokens=0,
        weight_version="v1",
    )


def ledger() -> Ledger:
    return Ledger(GreedyCodec(), "c<act>")


def test_strict_prefix() -> None:
    book = ledger()
    book.add_sample(answer("ab", "<end>"), 0)
    assert book.extend("c<act>ab<end>d<act>") is Boundary.STRICT_PREFIX
    assert GreedyCodec().decode(book.input_ids) == "c<act>ab<end>d<act>"


def test_trimmed_normalisation_keeps_what_was_sampled() -> None:
    book = ledger()
    book.add_sample(answer("ab", "\n", "<end>"), 0)  # the template strips the line end
    assert book.extend("c<act>ab<end>d<act>") is Boundary.TRIMMED
    assert GreedyCodec().decode(book.input_ids) == "c<act>ab\n<end>d<act>"
    (segment,) = book.segments()
    assert segment.tokens[segment.loss_mask].tolist() == [VOCAB.index(t) for t in ("ab", "\n", "<end>")]


def test_non_canonical_sample_is_kept_and_only_the_rest_is_tokenised() -> None:
    book = ledger()
    book.add_sample(answer("a", "b", "<end>"), 0)
    assert book.extend("c<act>ab<end>cd<act>") is Boundary.RETOKENISED
    assert book.input_ids[2:5] == [VOCAB.index(t) for t in ("a", "b", "<end>")]
    assert GreedyCodec().decode(book.input_ids) == "c<act>ab<end>cd<act>"


def test_rewritten_history_opens_a_new_chunk() -> None:
    book = ledger()
    book.add_sample(answer("ab", "<end>"), 0)
    assert book.extend("d<act>") is Boundary.NEW_CHUNK
    book.add_sample(answer("cd", "<end>"), 1)
    first, second = book.segments()
    assert first.turn_ids[first.loss_mask].tolist() == [0, 0]
    assert second.turn_ids[second.loss_mask].tolist() == [1, 1]
    assert GreedyCodec().decode(second.tokens.tolist()) == "d<act>cd<end>"


def trajectory(book: Ledger) -> Trajectory:
    return Trajectory(
        id="t",
        task_id="x",
        family="f",
        stratum=Stratum.EASY,
        attempt=0,
        seed=1,
        turns=(),
        segments=book.segments(),
        checks=(),
        end_reason=EndReason.DONE,
        verdict=Verdict.PASSED,
        weight_version="v1",
        raw_answers=book.raw_answers(),
    )


TOKEN = st.sampled_from(["ab", "a", "b", "c", "d", "cd", " ", "\n"])


@given(st.lists(st.tuples(st.lists(TOKEN, max_size=5), st.lists(TOKEN, max_size=4)), min_size=1, max_size=5), st.data())
def test_drift_is_zero_whatever_is_sampled_and_one_altered_id_is_refused(turns, data) -> None:
    book, text = ledger(), "c<act>"
    for index, (sampled, observed) in enumerate(turns):
        book.add_sample(answer(*sampled, "<end>"), index)
        text += "".join(sampled).strip() + "<end>" + "".join(observed) + "<act>"
        book.extend(text)
    whole = trajectory(book)
    assert count_drift(whole) == 0
    require_no_drift([whole])
    which = data.draw(st.integers(0, len(whole.segments) - 1))
    segment = whole.segments[which]
    position = data.draw(st.sampled_from(np.flatnonzero(segment.loss_mask).tolist()))
    tokens = segment.tokens.copy()
    tokens[position] = (tokens[position] + 1) % len(VOCAB)
    altered = (*whole.segments[:which], replace(segment, tokens=tokens), *whole.segments[which + 1 :])
    assert count_drift(replace(whole, segments=altered)) == 1
    with pytest.raises(DriftError, match="refused"):
        require_no_drift([replace(whole, segments=altered)])


def test_sampled_token_outside_the_mask_counts_as_drift() -> None:
    book = ledger()
    book.add_sample(answer("ab", "<end>"), 0)
    (segment,) = book.segments()
    mask = segment.loss_mask.copy()
    mask[-1] = False
    assert count_drift(replace(trajectory(book), segments=(replace(segment, loss_mask=mask),))) == 1


def test_a_control_token_of_the_template_is_not_lost_where_another_was_sampled() -> None:
    book = ledger()
    book.add_sample(answer("ab", "<act>"), 0)  # ended with another control token than the template's
    assert book.extend("c<act>ab<end>d<act>") is Boundary.TRIMMED
    assert GreedyCodec().decode(book.input_ids) == "c<act>ab<act><end>d<act>"


def test_a_repair_is_counted_once_and_the_next_boundary_is_compared_from_there() -> None:
    book = ledger()
    book.add_sample(answer("a", "b", "\n", "<end>"), 0)  # another tokenisation and a line end that the template strips
    text = "c<act>ab<end>d<act>"
    assert book.extend(text) is Boundary.RETOKENISED
    assert GreedyCodec().decode(book.input_ids) == "c<act>ab\n<end>d<act>"
    book.add_sample(answer("cd", "<end>"), 1)
    text += "cd<end>c<act>"
    assert book.extend(text) is Boundary.STRICT_PREFIX
    book.add_sample(answer("ab", " ", "<end>"), 2)
    text += "ab<end>d<act>"
    assert book.extend(text) is Boundary.TRIMMED
    assert book.boundaries == {Boundary.RETOKENISED: 1, Boundary.STRICT_PREFIX: 1, Boundary.TRIMMED: 1}
    assert len(book.segments()) == 1


def test_a_line_end_that_merges_with_the_templates_own_is_a_retokenised_boundary() -> None:
    """ "a" of the prompt and the sampled "b" are one token in any rendering."""
    book = Ledger(GreedyCodec(), "ca")
    book.add_sample(answer("b", "<end>"), 0)
    assert book.extend("cab<end>d<act>") is Boundary.RETOKENISED
    assert GreedyCodec().decode(book.input_ids) == "cab<end>d<act>"
    assert book.input_ids[1:3] == [VOCAB.index("a"), VOCAB.index("b")]


def test_routes_of_several_turns_join_through_every_repair() -> None:
    """Each request asks for the rows that are not held yet; together they are one row a token, but for the last (spec §6.2)."""
    book, text = ledger(), "c<act>"
    replies = (
        ["ab", "<end>"],
        ["a", "b", "<end>"],
        ["cd", "\n", "<end>"],
        ["c", "<end>"],
    )  # strict, re-tokenised, trimmed
    for turn, reply in enumerate(replies):
        start, prompt = book.expert_rows, len(book.input_ids)
        rows = np.arange(start, prompt + len(reply) - 1)  # a row that names its own position
        book.add_sample(replace(answer(*reply), routed_experts=rows[:, None, None].astype(np.int32)), turn)
        text += "".join(reply).replace("\n", "") + "d<act>"
        book.extend(text)
    assert set(book.boundaries) == {Boundary.STRICT_PREFIX, Boundary.RETOKENISED, Boundary.TRIMMED}
    (segment,) = book.segments()
    assert segment.rollout_routed_experts is not None
    assert segment.rollout_routed_experts.ravel().tolist() == list(range(len(segment.tokens) - 1))
    assert certify([trajectory(book)]).routed_share == 1.0


def test_a_certificate_tells_versions_apart() -> None:
    book = ledger()
    book.add_sample(answer("ab", "<end>"), 0)
    book.extend("c<act>ab<end>d<act>")
    book.add_sample(replace(answer("c", "<end>"), weight_version="v2"), 1)
    found = certify([trajectory(book)])
    assert found.weight_versions == {"v1": 2, "v2": 2}
    assert (found.mixed_attempts, found.loss_tokens, found.attempts) == (1, 4, 1)
    assert alarms(found.metrics())  # a step of two policies pages somebody
    assert found.boundaries[Boundary.NEW_CHUNK] == 0
