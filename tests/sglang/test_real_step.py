"""A whole PPO step on the real SGLang: sampled there, updated in torch, served again, the gap recorded, routes replayed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchestrator.inputs import shipped_model
from stages.backends.learner.torch_learner import TorchLearner
from stages.backends.protocols import Backends, OptimConfig
from stages.backends.sampler.sglang import SGLangSampler
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.certificate import GAP, REPLAYED, gap
from stages.chat import Chat
from stages.config import RolloutConfig, RPRConfig
from stages.context import StageContext
from stages.domain import Phase
from stages.records import AttemptFinished, StepDone
from stages.refine import refine
from stages.rewards import RewardKind, RewardModel
from stages.tasks.embedded import embedded_suite
from stages.tasks.generate import PoolKind
from tests.sglang.test_real_client import learner_of, request, sequences, use

pytestmark = pytest.mark.sglang


def test_calibration_and_a_joint_step_on_real_tasks(dense_url: str, tmp_path: Path, record_property) -> None:
    model = shipped_model()
    learner = TorchLearner(max_tokens_per_gpu=8192, num_threads=1)
    learner.load(model, None)
    learner.init_critic()
    learner.save(tmp_path / "seed")
    pool = embedded_suite(PoolKind.TRAIN, 40, tmp_path / "suites").tasks
    config = RPRConfig(
        global_batch_size=12,
        over_sampling_batch_size=12,
        joint_steps=1,
        max_new_tokens=40,
        actor_lr=1e-3,
        critic_lr=1e-3,
    )
    sampler = SGLangSampler([dense_url], model_path=model, truncated="refuse")
    with Backends(sampler=sampler, learner=learner, sandbox=BubblewrapBackend()) as backends:
        ctx = StageContext(
            backends=backends,
            chat=Chat(model),
            rollout=RolloutConfig(harness="shell", observation_chars=64, max_context_tokens=1024),
            seed=(0, "RPR-1", "main"),
            namespace="real",
            max_new_tokens=40,
            work_dir=tmp_path / "work",
        )
        stream = refine(
            ctx,
            config,
            pool,
            RewardModel(kind=RewardKind.BINARY),
            actor_dir=tmp_path / "seed" / "actor",
            critic_dir=tmp_path / "seed" / "critic",
        )
        records = list(stream)
        steps = [r for r in records if isinstance(r, StepDone)]
        assert [s.phase for s in steps] == [Phase.CALIBRATE] * 4 + [Phase.JOINT]
        certificates = [s.certificate for s in steps]
        for step, certificate in zip(steps, certificates, strict=True):
            assert certificate is not None
            assert certificate.drift_tokens == 0
            assert certificate.loss_tokens > 100
            assert certificate.gap is not None
            assert certificate.gap < 1e-4
            assert certificate.gap == step.metrics[GAP]
        assert {v for c in certificates if c for v in c.weight_versions} == {"RPR-1/main/update-0"}
        assert sampler.weight_version == "RPR-1/main/update-5"
        # the server now samples from the updated actor: its log-probs are the learner's new ones, and not the old ones
        wanted = [request(f"n{i}", sampling_seed=i + 1) for i in range(6)]
        batch = sequences(wanted, backends.run(sampler.generate(wanted)))
        assert (gap(batch, learner.log_probs(batch)) or 0) < 1e-4
        assert (gap(batch, learner_of(model).log_probs(batch)) or 0) > 1e-2
        passed = sum(r.trajectory.strict for r in records if isinstance(r, AttemptFinished))
        backends.run(sampler.update_weights_from_disk(model, "default"))
    print(f"dense: {passed}/60 attempts passed, gaps {[f'{c.gap:.2e}' for c in certificates if c and c.gap]}")


def test_an_update_of_a_mixture_of_experts_with_its_routes(moe_url: str, moe_model: Path, tmp_path: Path) -> None:
    learner = learner_of(moe_model)
    learner.start_phase(actor=OptimConfig(lr=1e-3), critic=None)
    wanted = [request(f"p{i}", new=60, routed=True) for i in range(16)]

    async def job(s: SGLangSampler) -> None:
        batch = sequences(wanted, await s.generate(wanted))
        rng = np.random.default_rng(0)
        batch = [replace(b, advantages=rng.standard_normal(len(b.tokens)).astype(np.float32)) for b in batch]
        before = await asyncio.to_thread(learner.actor_step, batch, eps_clip=0.3, eps_clip_high=5.0)
        assert before[REPLAYED] == 1.0
        assert (before["train/route_flip_share"] or 0) < 0.01  # float32 on both sides
        assert (before[GAP] or 0) < 1e-4
        learner.save_actor_only(tmp_path / "new", None)
        await s.update_weights_from_disk(tmp_path / "new" / "actor", "1")
        answers = await s.generate(wanted)
        assert {a.weight_version for a in answers} == {"1"}
        batch = sequences(wanted, answers)
        after, stale = gap(batch, learner.log_probs(batch)), gap(batch, learner_of(moe_model).log_probs(batch))
        print(f"MoE: gap {before[GAP]:.2e} before, {after:.2e} after the update, {stale:.2e} against the old weights")
        assert (after or 0) < 1e-4 < 1e-2 < (stale or 0)
        await s.update_weights_from_disk(moe_model, "default")

    use(moe_url, moe_model, job)
