"""Micro-batches: the budget, the order, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.backends.learner.packing import check_batch, pack, unpack
from stages.backends.protocols import TrainSequence
from stages.errors import BatchError


def sequence(length: int, masked: list[int], **more: object) -> TrainSequence:
    mask = np.zeros(length, bool)
    mask[masked] = True
    return TrainSequence(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        rollout_log_probs=np.arange(length, dtype=np.float32),
        **more,  # type: ignore[arg-type]
    )


@given(st.lists(st.tuples(st.integers(2, 30), st.integers(0, 2**30 - 1)), min_size=1, max_size=12), st.integers(30, 90))
def test_every_masked_token_is_in_exactly_one_micro_batch(shapes: list[tuple[int, int]], budget: int) -> None:
    batch = [sequence(n, [j for j in range(1, n) if bits >> j & 1] or [1]) for n, bits in shapes]
    packed = pack(batch, max_tokens=budget, fields=("rollout_log_probs",))
    assert all(m.padded_tokens <= budget for m in packed.micro_batches)
    back = unpack(packed, [m.fields["rollout_log_probs"] for m in packed.micro_batches], batch)
    for seq, array in zip(batch, back, strict=True):
        np.testing.assert_array_equal(array, np.where(seq.loss_mask, seq.rollout_log_probs, 0))
    assert packed.masked_tokens == sum(int(s.loss_mask.sum()) for s in batch)
    for (
        m
    ) in packed.micro_batches:  # token j is read at the prefix that ends with token j-1; here token ids are positions
        prefix = m.ids_bT.flatten()[m.prefix_N]
        assert (prefix == m.targets_N - 1).all()


def test_a_sequence_over_the_budget_goes_alone_with_a_warning() -> None:
    batch = [sequence(50, [49]), sequence(5, [2]), sequence(5, [3])]
    with pytest.warns(UserWarning, match="max_tokens_per_gpu=20"):
        packed = pack(batch, max_tokens=20)
    assert [[i for i, _ in m.places] for m in packed.micro_batches] == [[0], [2, 1]]


def test_what_follows_the_last_masked_token_is_not_computed() -> None:
    packed = pack([sequence(50, [3, 9])], max_tokens=1000)
    assert packed.micro_batches[0].ids_bT.shape == (1, 9)


def test_order_depends_on_the_batch_alone() -> None:
    batch = [sequence(n, [n - 1]) for n in (7, 12, 7, 3, 12)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        places = [[i for i, _ in m.places] for m in pack(batch, max_tokens=24).micro_batches]
    assert places == [[1, 4], [0, 2, 3]]


@pytest.mark.parametrize(
    "batch, message",
    [
        ([], "empty"),
        ([sequence(40, [3])], "context holds 32"),
        ([sequence(5, [0, 2])], "has no prefix"),
        ([sequence(30, [3])], "vocabulary of 20"),
        ([sequence(5, [2], advantages=np.zeros(4, np.float32))], "advantages has 4 entries for 5 tokens"),
    ],
)
def test_refused(batch: list[TrainSequence], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        check_batch(batch, context_len=32, vocab_size=20)


def test_a_batch_without_masked_tokens_or_fields_is_refused() -> None:
    with pytest.raises(BatchError, match="no token"):
        pack([sequence(5, [])], max_tokens=10)
    with pytest.raises(BatchError, match="has no old_values"):
        pack([sequence(5, [2])], max_tokens=10, fields=("old_values",))
