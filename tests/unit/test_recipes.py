"""Recipes, plan and task draws: clear errors, spec defaults, stable draws."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.inputs import refuse_unsupported
from orchestrator.plan import estimate, plan
from orchestrator.recipes import load_recipe, recipe_names
from stages.config import RPRConfig, TaskDraw
from stages.domain import Stratum, Task
from stages.errors import ConfigError
from stages.tasks.draw import draw_tasks


def test_shipped_recipes_load_and_plan_five_checkpoints() -> None:
    assert {"demo", "paper", "smoke"} <= set(recipe_names())
    for name in recipe_names():
        config = load_recipe(name)
        assert [p.name for p in plan(config)] == ["Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2"]
        assert estimate(config).attempts > 0
        refuse_unsupported(config)


def test_the_paper_recipe_has_the_published_values() -> None:
    """Spec §2.3's table."""
    paper = load_recipe("paper")
    one, two = paper.rpr_of(1), paper.rpr_of(2)
    assert (one.actor_lr, two.actor_lr, one.critic_lr, two.critic_lr) == (5e-7, 1e-7, 1.5e-5, 1.5e-5)
    for rpr in (one, two):
        assert (rpr.eps_clip, rpr.eps_clip_high, rpr.value_clip, rpr.critic_clip_grad) == (0.30, 5.00, 4.00, 100.0)
        assert (rpr.gamma_turn, rpr.lambda_turn, rpr.num_critic_only_steps) == (1.0, 1.0, 4)
        assert (rpr.global_batch_size, rpr.over_sampling_batch_size) == (256, 288)
        assert not rpr.whiten_advantages
        assert rpr.inherit_critic
    assert (one.reward.kind, two.reward.kind) == ("fdr", "spr")
    assert (paper.rollout.harness, paper.sampler.backend, paper.learner.backend) == ("terminus2", "sglang", "megatron")
    assert paper.rsr_of(1).explore.attempts_per_task == paper.rsr_of(1).replay.attempts_per_runbook == 4


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"rollout.lanez": 2}, "lanez"),
        ({"rpr.0.global_batch_size": 0}, "global_batch_size"),
        ({"rpr.0.over_sampling_batch_size": 8}, "over_sampling_batch_size"),
        ({"rpr.0.num_critic_only_steps": 3}, "num_critic_only_steps"),
        ({"rpr.0.keep_steps": [99]}, "keep_steps"),
        ({"rpr.9.joint_steps": 1}, "rpr.9"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_wrong_value_is_named(overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_recipe("smoke", overrides=overrides)


def test_what_is_wrong_is_said_where_it_was_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"smoke\.toml with foo changed cannot be used:\n  foo: there is no such key"):
        load_recipe("smoke", overrides={"foo": 1})
    with pytest.raises(ConfigError, match="--set validation_suite=DIR"):
        load_recipe("smoke", overrides={"pool": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"mine\.toml: no such file"):
        load_recipe(str(tmp_path / "mine.toml"))
    (tmp_path / "folder.toml").mkdir()
    for no_file in (tmp_path, tmp_path / "folder.toml"):
        with pytest.raises(ConfigError, match="no recipe"):
            load_recipe(str(no_file))


def test_an_unknown_recipe_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="demo"):
        load_recipe("nonsense")
    broken = tmp_path / "x.toml"
    broken.write_text("rounds = ")
    with pytest.raises(ConfigError, match="not TOML"):
        load_recipe(str(broken))


def test_a_step_and_one_batch_are_one_update_by_default() -> None:
    assert RPRConfig().n_samples_per_prompt == 1


def pool(n: int) -> list[Task]:
    strata = list(Stratum)
    return [
        Task(
            id=f"t{i}", suite="s", family="f", stratum=strata[i % 4], instruction="x", root=Path("/none"), digest=str(i)
        )
        for i in range(n)
    ]


@given(n=st.integers(1, 90), size=st.integers(4, 40), seed=st.integers(0, 9))
def test_draws_are_stable_have_the_asked_size_and_repeat_only_when_used_up(n: int, size: int, seed: int) -> None:
    tasks = pool(size)
    draw = TaskDraw(stratum_weights={Stratum.EASY: 2, Stratum.HARD: 1})
    drawn = draw_tasks(tasks, draw, n=n, seed=(seed,))
    assert drawn == draw_tasks(tasks, draw, n=n, seed=(seed,))
    assert len(drawn) == n
    assert {t.stratum for t in drawn} <= {Stratum.EASY, Stratum.HARD}
    easy = sum(t.stratum is Stratum.EASY for t in drawn)
    assert abs(easy - n * 2 / 3) < 1
    for stratum in (Stratum.EASY, Stratum.HARD):
        counts = Counter(t.id for t in drawn if t.stratum is stratum)
        assert (
            not counts or max(counts.values()) - min([counts.get(t.id, 0) for t in tasks if t.stratum is stratum]) <= 1
        )


def test_a_draw_from_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no task"):
        draw_tasks([], TaskDraw(), seed=(1,))
