"""Base is the candidate of its recipe that does best on the protected validation suite."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from stages.backends.protocols import Backends
from stages.chat import Chat
from stages.config import EvaluateConfig, RolloutConfig, SamplingConfig
from stages.context import StageContext
from stages.domain import Phase
from stages.evaluate import Option, select
from stages.pretrain.build import BuildRecipe, write_recipe
from stages.records import Selected
from stages.tasks.harbor import Suite

ROLLOUT = RolloutConfig(
    harness="shell", observation_chars=64, max_context_tokens=1024, wave_size=120, sampler_threads=1
)
VALIDATE = EvaluateConfig(attempts_per_task=3, sampling=SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=40))


def choose_base(candidates: Sequence[Path], validation: Suite, out: Path, recipe: BuildRecipe) -> Iterator[str]:
    """Scores every candidate folder, copies the best to `out` and writes its recipe, digest and all scores beside it."""
    from stages.backends.learner.torch_learner import TorchLearner
    from stages.backends.sampler.embedded import EmbeddedSampler
    from stages.backends.sandbox.bubblewrap import BubblewrapBackend

    backends = Backends(
        sampler=EmbeddedSampler(candidates[0], num_threads=1),
        learner=TorchLearner(max_tokens_per_gpu=8192),
        sandbox=BubblewrapBackend(),
    )
    with backends:
        ctx = StageContext(
            backends=backends,
            chat=Chat(candidates[0]),
            rollout=ROLLOUT,
            seed=(recipe.seed, "base"),
            namespace="base",
            max_new_tokens=VALIDATE.sampling.max_new_tokens,
            work_dir=out,
        )
        options = [Option(label=folder.name, actor_dir=folder) for folder in candidates]
        stream = select(ctx, VALIDATE, validation, Phase.VALIDATE, options)
        while True:
            try:
                record = next(stream)
            except StopIteration as stop:
                chosen: Option = stop.value
                break
            if isinstance(record, Selected):
                scores = {c.label: f"{c.passed}/{c.attempts}" for c in record.candidates}
                yield f"validation: {scores}, chosen {record.chosen}"
    shutil.copytree(chosen.actor_dir, out, dirs_exist_ok=True)
    facts = {"validation": scores, "validation_digest": validation.digest, "chosen": chosen.label}
    write_recipe(out, recipe, facts)
