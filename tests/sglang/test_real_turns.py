"""Conversations of several turns on the real server: token in, token out, and the routes of every position exactly once."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from stages.backends.protocols import GenerateAnswer, GenerateRequest, SamplingParams, TrainSequence
from stages.backends.sampler.sglang import SGLangSampler
from stages.certificate import gap
from stages.chat import Chat
from stages.tokens import Ledger, count_drift
from tests import factories
from tests.sglang.test_real_client import learner_of, use

pytestmark = pytest.mark.sglang
ROWS, TURNS = 6, 5


def sent(ledger: Ledger, name: str, seed: int, stop: tuple[int, ...]) -> GenerateRequest:
    return GenerateRequest(
        rid=name,
        input_ids=list(ledger.input_ids),
        sampling_params=SamplingParams(max_new_tokens=24, sampling_seed=seed, stop_token_ids=stop),
        return_routed_experts=True,
        routed_experts_start_len=ledger.expert_rows,
    )


async def converse(sampler: SGLangSampler, chat: Chat) -> list[Ledger]:
    """Five turns of six conversations; each turn is asked only for the rows that are not held yet."""
    await sampler.start()
    assert sampler.is_moe
    talks = [[chat.task_message(f"write the word w{i} into the file f{i}.txt")] for i in range(ROWS)]
    ledgers = [Ledger(chat, chat.render(talk)) for talk in talks]
    for turn in range(TURNS):
        lengths = [ledger.expert_rows for ledger in ledgers]
        wave = [sent(b, f"t{i}", 1 + 10 * turn + i, chat.stop_token_ids) for i, b in enumerate(ledgers)]
        answers = await sampler.generate(wave)
        for ledger, talk, request, answer, held in zip(ledgers, talks, wave, answers, lengths, strict=True):
            assert answer.routed_experts is not None
            assert len(answer.routed_experts) == len(request.input_ids) + len(answer.output_ids) - 1 - held
            assert answer.cached_tokens >= held  # what the turn before left on the server was not computed again
            ledger.add_sample(answer, turn)
            talk.append({"role": "assistant", "content": chat.decode(chat.strip_stop(answer.output_ids))})
            talk.append(chat.observation_message(f"exit {turn}\nline {turn} of {request.rid}"))
            ledger.extend(chat.render(talk))
    return ledgers


async def prefilled(sampler: SGLangSampler, url: str, tokens: np.ndarray) -> GenerateAnswer:
    """The routes of one request that computes the whole sequence at once, on a server that remembers nothing."""
    for _ in range(50):  # refused while the last request is being put away
        if httpx.post(f"{url}/flush_cache", timeout=30).status_code == 200:
            break
        time.sleep(0.1)
    request = GenerateRequest(
        rid="whole",
        input_ids=tokens.tolist(),
        sampling_params=SamplingParams(max_new_tokens=1),
        return_routed_experts=True,
    )
    (answer,) = await sampler.generate([request])
    assert answer.cached_tokens == 0
    return answer


def test_routes_of_turns_join_to_those_of_one_prefill(moe_url: str, moe_model: Path) -> None:
    chat = Chat(moe_model)

    async def job(sampler: SGLangSampler) -> tuple[list[Ledger], list[np.ndarray]]:
        ledgers = await converse(sampler, chat)
        whole = []
        for segment in (s for ledger in ledgers for s in ledger.segments()):
            answer = await prefilled(sampler, moe_url, segment.tokens)
            assert answer.routed_experts is not None
            whole.append(answer.routed_experts[: len(segment.tokens) - 1])
        return ledgers, whole

    ledgers, whole = use(moe_url, moe_model, job)
    segments = [s for ledger in ledgers for s in ledger.segments()]
    assert max(len(set(s.turn_ids[s.loss_mask])) for s in segments) >= 3
    different, decisions = 0, 0
    for segment, routes in zip(segments, whole, strict=True):
        joined = segment.rollout_routed_experts
        assert joined is not None
        assert joined.shape == routes.shape == (len(segment.tokens) - 1, 3, 2)
        different += int((joined != routes).any(-1).sum())
        decisions += len(joined) * 3
    assert (
        different <= 1e-3 * decisions
    )  # a prefill adds up in another order than a decode: near ties may fall otherwise
    shifted = [(s.rollout_routed_experts[1:] != r[:-1]).any(-1).mean() for s, r in zip(segments, whole, strict=True)]  # type: ignore[index]
    assert min(shifted) > 0.3  # the comparison would notice a row that is missing or held twice
    for ledger in ledgers:
        trajectory = replace(
            factories.trajectory(1), segments=ledger.segments(), raw_answers=ledger.raw_answers(), boundaries={}
        )
        assert count_drift(trajectory) == 0
    batch = [
        TrainSequence(
            tokens=s.tokens,
            loss_mask=s.loss_mask,
            rollout_log_probs=s.rollout_log_probs,
            rollout_routed_experts=s.rollout_routed_experts,
        )
        for s in segments
    ]
    found = gap(batch, learner_of(moe_model).log_probs(batch))
    assert found is not None
    assert found < 1e-4
    boundaries = sum((Counter(ledger.boundaries) for ledger in ledgers), Counter())
    print(
        f"turns: {decisions} routes of {len(segments)} segments, {different} unlike a prefill's; gap {found:.2e};"
        f" boundaries {dict(boundaries)}"
    )
