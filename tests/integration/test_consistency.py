"""Tokens in, tokens out (spec §6.1) end to end: Qwen3's template, a tokenizer whose boundaries drift, real sandboxes.

A scripted sampler gives ids that a tokenizer would not give for its text. All four outcomes occur, drift is 0, the step's
certificate says so, and one altered id refuses the step before the learner is asked for anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from orchestrator import models as m
from orchestrator.commands.cycle_view import certificate_table
from orchestrator.persist import Recorder
from orchestrator.store import Store
from stages.backends.protocols import Backends, GenerateAnswer, GenerateRequest, Learner, Sampler, TrainSequence
from stages.backends.sampler.sglang import SGLangSampler
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.batch import score
from stages.certificate import GAP, certify
from stages.chat import Chat
from stages.config import RolloutConfig, RPRConfig
from stages.context import StageContext
from stages.domain import Boundary, EndReason, Phase, Task, Trajectory, Verdict
from stages.errors import DriftError, SamplerError
from stages.records import AttemptFinished, BatchReady, Record, StepDone
from stages.refine import refine
from stages.rewards import RewardKind, RewardModel
from tests import factories
from tests.integration.sandbox_kit import make_task
from tests.unit.sampler_sglang.client import SIZES
from tests.unit.sglang_replay import echo, recording, server

# The lines of Qwen3's chat template that a conversation without tools and system message meets.
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}{%- set content = message.content %}{%- set thoughts = '' %}
{%- if '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}
{{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REPLIES: dict[str, list[str]] = {  # pieces that are encoded one by one, as a model may sample them
    "strict": ["mkdir -p out", "<|im_end|>"],
    "line": ["\n", "true", "<|im_end|>"],  # the template's own line ends and this one are one token
    "merge": ["ls in", "put > out/li", "st.txt", "<|im_end|>"],  # the words are one token each in any rendering
    "eos": ["echo 42 > answer.txt", "<|endoftext|>"],  # a base model's end, where the template has its own
    "after": ["cat answer.txt", "<|im_end|>"],  # a repair is no repair of what follows
    "thought": ["<think>hm</think>\n\n: thought", "<|im_end|>"],  # the template drops thoughts from the history
    "done": ["done", "<|im_end|>"],
}
EXPECTED = {Boundary.STRICT_PREFIX: 2, Boundary.TRIMMED: 1, Boundary.RETOKENISED: 2, Boundary.NEW_CHUNK: 1}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["".join(pieces) for pieces in REPLIES.values()] + ["assistant\n\n\n user\n input list.txt"]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(t) for t in ("<think>", "</think>")])  # no special tokens in Qwen3 either
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.chat_template = QWEN3
    folder = tmp_path_factory.mktemp("qwen3-chat")
    fast.save_pretrained(folder)
    return Chat(folder)


class PieceSampler:
    """Says the replies of the script in order, piece by piece."""

    weight_version, vocab_size, context_len = "", 1000, 100_000

    def __init__(self, chat: Chat) -> None:
        self._chat, self._turns = chat, {}
        self.requests: list[GenerateRequest] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateAnswer]:
        return [self._answer(r) for r in requests]

    def _answer(self, request: GenerateRequest) -> GenerateAnswer:
        self.requests.append(request)
        turn = self._turns[request.rid] = self._turns.get(request.rid, -1) + 1
        ids = tuple(i for piece in list(REPLIES.values())[turn] for i in self._chat.encode(piece))
        return GenerateAnswer(
            rid=request.rid,
            output_ids=ids,
            output_token_logprobs=tuple(-0.25 for _ in ids),
            finish_reason="stop",
            prompt_tokens=len(request.input_ids),
            cached_tokens=0,
            weight_version=self.weight_version,
        )

    async def release(self, rids: Sequence[str]) -> None:
        return None

    async def update_weights_from_disk(self, model_path: Path, weight_version: str) -> None:
        self.weight_version = weight_version

    async def aclose(self) -> None:
        return None


class Bookkeeper:
    """A learner without a model: it notes what it was asked for. Its log-probs are 0.05 off."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def noted(*args: object, **kwargs: object) -> Any:
            self.asked.append(name)
            if name.endswith("_step"):
                return {}
            return [self._row(s, name) for s in cast("Sequence[TrainSequence]", args[0])] if args else None

        return noted

    @staticmethod
    def _row(sequence: TrainSequence, name: str) -> np.ndarray:
        value = np.float32(-0.3) if name == "log_probs" else np.float32(0)
        return np.where(sequence.loss_mask, value, np.float32(0))

    def load(self, *folders: object) -> None:
        self.asked.append("load")


def stage_context(
    chat: Chat, learner: Bookkeeper, folder: Path, sampler: Sampler | None = None
) -> tuple[StageContext, Backends]:
    backends = Backends(
        sampler=sampler or PieceSampler(chat), learner=cast("Learner", learner), sandbox=BubblewrapBackend()
    )
    ctx = StageContext(
        backends=backends,
        chat=chat,
        rollout=RolloutConfig(harness="shell"),
        seed=(0, "RPR-1", "main"),
        namespace="test",
        max_new_tokens=100,
        work_dir=folder / "work",
    )
    return ctx, backends


CONFIG = RPRConfig(global_batch_size=2, over_sampling_batch_size=2, n_samples_per_prompt=2, joint_steps=1)
REWARD = RewardModel(kind=RewardKind.BINARY)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return replace(make_task(tmp_path), instruction="Write 42 to answer.txt and list input/.")


def first_step(ctx: StageContext, task: Task, recorder: Recorder, altered: int | None = None) -> list[Record]:
    """A calibration step as a flow runs it; `altered`: which attempt comes to the store with one other token."""
    seen: list[Record] = []
    stream = refine(ctx, CONFIG, [task], REWARD, actor_dir=Path("actor"), critic_dir=Path("critic"))
    try:
        for record in stream:
            if isinstance(record, BatchReady) and altered is not None:
                record = replace(record, trajectories=with_other_token(record.trajectories, altered))
            recorder.record(record)
            seen.append(record)
            if isinstance(record, StepDone):
                return seen
    finally:
        stream.close()
    raise AssertionError("no step was done")


def with_other_token(trajectories: Sequence[Trajectory], which: int) -> tuple[Trajectory, ...]:
    whole = trajectories[which]
    segment = whole.segments[-1]
    tokens = segment.tokens.copy()
    tokens[np.flatnonzero(segment.loss_mask)[0]] += 1
    changed = replace(whole, segments=(*whole.segments[:-1], replace(segment, tokens=tokens)))
    return tuple(changed if n == which else t for n, t in enumerate(trajectories))


def test_all_four_outcomes_in_real_attempts_and_a_certificate_in_the_store(
    store: Store, chat: Chat, task: Task, tmp_path: Path
) -> None:
    stage = new_stage(store, task)
    learner = Bookkeeper()
    ctx, backends = stage_context(chat, learner, tmp_path)
    with backends, Recorder(store, stage) as recorder:
        seen = first_step(ctx, task, recorder)
    attempts = [r.trajectory for r in seen if isinstance(r, AttemptFinished)]
    assert len(attempts) == 2
    for whole in attempts:
        assert (whole.end_reason, whole.verdict, whole.drift_tokens) == (EndReason.DONE, Verdict.PASSED, 0)
        assert dict(whole.boundaries) == EXPECTED
        said = [i for s in whole.segments for i in s.tokens[s.loss_mask].tolist()]
        assert said == [i for pieces in REPLIES.values() for piece in pieces for i in chat.encode(piece)]
        # the tokenizer would have given others: these boundaries really drift
        assert said != [i for pieces in REPLIES.values() for i in chat.encode("".join(pieces))]
        text = chat.decode(whole.segments[0].tokens.tolist())
        assert text.count("<think>\n\n</think>\n\n") == text.count("<|im_start|>assistant") == 6
        assert "<|endoftext|><|im_end|>\n<|im_start|>user\n" in text
    done = seen[-1]
    assert isinstance(done, StepDone)
    certificate = done.certificate
    assert certificate is not None
    assert (certificate.attempts, certificate.drift_tokens, certificate.routed_share) == (2, 0, None)
    assert certificate.boundaries == {b: 2 * n for b, n in EXPECTED.items()}
    assert certificate.weight_versions == {"RPR-1/main/update-0": certificate.loss_tokens}
    assert certificate.gap == pytest.approx(0.05, abs=1e-6)
    # what the store has of it: metrics, and the whole certificate in the step's event
    (metrics,) = store.metrics.steps(stage.id or 0, Phase.CALIBRATE).values()
    assert metrics["rollout/boundary_retokenised_boundary"] == 4
    assert metrics[GAP] == pytest.approx(0.05, abs=1e-6)
    event = next(e for e in store.events.latest(cycle_id=stage.cycle_id) if e.kind == m.EventKind.STEP_DONE)
    assert event.payload["certificate"]["weight_versions"] == dict(certificate.weight_versions)
    table = certificate_table(store, [stage])
    assert table is not None
    assert [next(iter(c.cells)) for c in table.columns][:4] == ["RPR-1", "calibrate", "1", "0"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_token_that_the_stored_answers_do_not_hold_refuses_the_step(
    store: Store, chat: Chat, task: Task, tmp_path: Path, which: int
) -> None:
    stage = new_stage(store, task)
    learner = Bookkeeper()
    ctx, backends = stage_context(chat, learner, tmp_path)
    with backends, Recorder(store, stage) as recorder, pytest.raises(DriftError, match="The step is refused"):
        first_step(ctx, task, recorder, altered=which)
    assert not [name for name in learner.asked if name.endswith("_step") or name == "save"]
    assert store.metrics.steps(stage.id or 0, Phase.CALIBRATE) == {}


def test_a_drifted_batch_is_refused_before_the_learner_is_asked(
    store: Store, chat: Chat, task: Task, tmp_path: Path
) -> None:
    stage = new_stage(store, task)
    ctx, backends = stage_context(chat, Bookkeeper(), tmp_path)
    with backends, Recorder(store, stage) as recorder:
        seen = first_step(ctx, task, recorder)
    attempts = [r.trajectory for r in seen if isinstance(r, AttemptFinished)]
    learner = Bookkeeper()
    with pytest.raises(DriftError, match=r"1 trajectories differ .* 1 tokens"):
        score(cast("Learner", learner), CONFIG, with_other_token(attempts, 1), REWARD)
    assert learner.asked == []
    assert certify(attempts).boundaries == {b: 2 * n for b, n in EXPECTED.items()}


def test_a_server_that_dies_in_mid_batch_is_an_error_before_any_weight_changes(
    chat: Chat, task: Task, tmp_path: Path
) -> None:
    actor = tmp_path / "actor"
    sizes = {"vocab_size": chat.vocab_size, "max_position_embeddings": 4096}
    Qwen3Config(**(SIZES | sizes)).save_pretrained(actor)
    with server(context_length=4096) as replay:
        replay.vocabulary = chat.vocab_size
        replay.on("/update_weights_from_disk", recording("dense2/upd_disk"))
        replay.answers["/model_info"][0]["body"]["weight_version"] = "RPR-1/main/update-0"  # type: ignore[index]

        def first(body: Any) -> Any:
            found = echo("dense/gen_logprob", version="RPR-1/main/update-0")(body)
            found["body"]["meta_info"]["prompt_tokens"] = len(body["input_ids"])
            return found

        replay.on("/generate", first, lambda _: setattr(replay, "dead", True))
        learner = Bookkeeper()
        sampler = SGLangSampler([replay.url], model_path=actor)
        ctx, backends = stage_context(chat, learner, tmp_path, sampler)
        stream = refine(ctx, CONFIG, [task], REWARD, actor_dir=actor, critic_dir=tmp_path)
        with backends, pytest.raises(SamplerError, match="no SGLang server is left"):
            list(stream)
        assert len(replay.sent("/generate")) == 2
    assert learner.asked == ["load", "start_phase", "close"]


def new_stage(store: Store, task: Task) -> m.Stage:
    """A running stage whose pool holds the task."""
    cycle = factories.cycle(store)
    store.suites.register("tests", "digest", m.Split.TRAIN, [task], version="1", path=str(task.root))
    return factories.stages(store, cycle.id or 0)[2]
