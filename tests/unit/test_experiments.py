"""Specifications of experiments: what is refused and why, what arms share, what a matched arm is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from orchestrator.experiments.coincide import canonical, refuse_coinciding
from orchestrator.experiments.report import contrasts_of
from orchestrator.experiments.run import checked
from orchestrator.experiments.spec import ExperimentSpec, load_spec, parse_spec, spec_names
from orchestrator.experiments.spent import Spent, matched
from orchestrator.experiments.tree import branches, stage_keys
from orchestrator.plan import plan
from orchestrator.recipes import load_recipe
from stages.advantage import Estimator, estimators_coincide
from stages.config import RPRConfig
from stages.errors import ConfigError

TOKEN = [Estimator.TOKEN_ALL, Estimator.TOKEN_POLICY]


def spec(*arms: dict[str, Any], **more: Any) -> ExperimentSpec:
    values = {"name": "x", "question": "?", "recipe": "demo", "arm": list(arms)} | more
    return parse_spec(values, "test")


def arm(name: str, **overrides: Any) -> dict[str, Any]:
    return {"name": name, "set": {k.replace("__", "."): v for k, v in overrides.items()}}


# ------------------------------------------------------------------------------------------------ specifications


@pytest.mark.parametrize("name", spec_names())
def test_every_shipped_specification_can_be_planned(name: str) -> None:
    loaded = load_spec(name)
    tree = branches({run: c for run, c in checked(loaded).items() if loaded.arm_named(run[0]).match is None})
    assert all(b.parent is None or b.parent in {x.key for x in tree[:i]} for i, b in enumerate(tree))  # parents first
    assert contrasts_of(loaded)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is empty"),
        ("name = ", "not TOML"),
        ('name = "x"\nquestion = "?"\nrecipe = "demo"', "no arm and no factor"),
        ('name = "x"\nquestion = "?"\nrecipe = "demo"\n[[arm]]\nname = "a"', "one arm"),
        ('name = "x"\nquestion = "?"\nrecipe = "demo"\n[[arm]]\nname = "a"\n[[arm]]\nname = "a"', "'a' is given twice"),
        ('name = "x"\nquestion = "?"\nrecipe = "demo"\nseeds = []\n[[arm]]\nname = "a"\n[[arm]]\nname = "b"', "seeds"),
        ('name = "x"\nquestion = "?"\nrecipe = "demo"\ncolour = 1\n[[arm]]\nname = "a"\n[[arm]]\nname = "b"', "colour"),
        (
            'name = "x"\nquestion = "?"\nrecipe = "demo"\n[[arm]]\nname = "a"\n[[arm]]\nname = "b"\n'
            '[[contrast]]\nname = "c"\nplus = ["a"]\nminus = ["z"]',
            "unknown arm 'z'; there are a, b",
        ),
        (
            'name = "x"\nquestion = "?"\nrecipe = "demo"\n[[arm]]\nname = "a"\n[[arm]]\nname = "b"\nmatch = "q"',
            "no arm with settings of its own",
        ),
    ],
)
def test_a_bad_file_is_refused_in_words(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_spec(str(file))


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"critic-inheritance.*path of a \.toml"):
        load_spec("nothing")


def test_an_override_that_the_recipe_refuses_names_its_arm() -> None:
    with pytest.raises(ConfigError, match=r"arm 'b'.*\n.*joint_step"):
        checked(spec(arm("a"), arm("b", rpr__1__joint_step=3)))


def test_every_round_is_reached_by_a_star() -> None:
    found = spec(arm("a"), arm("b", **{"rpr.*.lambda_turn": 0.9})).config(
        ExperimentSpec.model_validate(spec(arm("a"), arm("b", **{"rpr.*.lambda_turn": 0.9}))).arm_named("b"), 0
    )
    assert [r.lambda_turn for r in found.rpr] == [0.9, 0.9]
    with pytest.raises(ConfigError, match="no list"):
        load_recipe("demo", overrides={"rollout.*.lanes": 1})


# ------------------------------------------------------------------------------------------------ coincidence


@pytest.mark.parametrize(
    "a, b, why",
    [
        ({}, {}, "differ in nothing"),
        ({}, {"rpr__1__lambda_turn": 1.0}, "differ in nothing"),  # the recipe's value, written out
        (
            {"rpr__1__gamma_turn": 1.0},
            {"rpr__1__estimator": "token_all"},
            "TB-GAE .1, 1. is token GAE .1, 1.",
        ),
        ({"rpr__1__estimator": "token_all"}, {"rpr__1__estimator": "token_policy"}, "telescopes"),
        (
            {"rpr__1__estimator": "token_policy", "rpr__1__lambda_token_per_turn": 1.0},
            {"rpr__1__gamma_turn": 1.0},
            "telescopes",
        ),
        ({}, {"rpr__1__lambda_token": 0.9}, "not used"),
        ({}, {"rpr__1__handover": "none"}, "nothing is ever summarised"),
        ({"rpr__1__handover": "value_only"}, {"rpr__1__handover": "none"}, "every hand-over is the same"),
        ({}, {"rpr__0__inherit_critic": False}, "no critic to inherit"),
        ({}, {"rsr__0__replay__harness": "shell"}, "explores anyway"),
    ],
)
def test_arms_that_are_the_same_are_refused_with_the_reason(a: dict[str, Any], b: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        checked(spec(arm("a", **a), arm("b", **b)))


@pytest.mark.parametrize(
    "a, b",
    [
        ({}, {"rpr__1__critic_reset": "cold"}),
        ({"rpr__1__critic_reset": "cold"}, {"rpr__1__critic_reset": "seed"}),
        ({}, {"rpr__1__calibrate": False}),
        ({"rpr__1__lambda_turn": 0.95}, {"rpr__1__estimator": "token_all", "rpr__1__lambda_token": 0.95}),
        ({}, {"rpr__1__reward__kind": "fdr"}),
        ({}, {"rsr__0__replay__harness": "terminus2"}),
        (
            {"rollout__harness": "terminus2"},
            {"rollout__harness": "terminus2", "rpr__1__handover": "none"},
        ),
    ],
)
def test_arms_that_differ_are_let_through(a: dict[str, Any], b: dict[str, Any]) -> None:
    given_ = spec(arm("a", **a), arm("b", **b))
    refuse_coinciding({x.name: given_.config(x, 0) for x in given_.arms()})


CLOCK = some.sampled_from([0.5, 0.95, 1.0])


@given(some.sampled_from(list(Estimator)), CLOCK, CLOCK, some.sampled_from(list(Estimator)), CLOCK, CLOCK)
@settings(max_examples=60, deadline=None)
def test_the_canonical_form_agrees_with_the_algebra(
    e1: Estimator, g1: float, l1: float, e2: Estimator, g2: float, l2: float
) -> None:
    def rpr(e: Estimator, g: float, lam: float) -> RPRConfig:
        clock = "turn" if e is Estimator.TB_GAE else "token"
        return RPRConfig.model_validate({"estimator": e, f"gamma_{clock}": g, f"lambda_{clock}": lam})

    base = load_recipe("smoke", overrides={"rounds": 1})
    one, two = (canonical(base.model_copy(update={"rpr": (rpr(*x),)}))[0] for x in ((e1, g1, l1), (e2, g2, l2)))
    assert (one.rpr == two.rpr) is estimators_coincide((e1, g1, l1), (e2, g2, l2))


def test_a_reset_to_a_seed_critic_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="only a later round"):
        checked(spec(arm("a"), arm("b", rpr__0__critic_reset="seed")))


def test_calibration_is_the_contract_outside_experiments() -> None:
    with pytest.raises(ConfigError, match="exactly four critic-only updates"):
        load_recipe("demo", overrides={"rpr.1.calibrate": False})
    config = load_recipe("demo", overrides={"rpr.1.calibrate": False, "experiment": "x/b"})
    assert config.rpr_of(2).critic_only_steps == 0
    assert config.rpr_of(2).departures() == ("no calibration",)
    with pytest.raises(ConfigError, match="choose one"):
        load_recipe("demo", overrides={"rpr.1.critic_reset": "cold", "rpr.1.inherit_critic": False})


# ------------------------------------------------------------------------------------------------ what arms share


def test_the_prefix_that_arms_share_runs_once_per_seed() -> None:
    given_ = spec(arm("a"), arm("b", rpr__1__critic_reset="cold"), arm("c", rsr__1__distil__lr=1e-5), seeds=[0, 7])
    tree = branches(checked(given_))
    first = [b for b in tree if b.seed == 0]
    assert [(b.title, b.label) for b in first] == [
        ("Base…RPR-1", "shared by 3 arms"),
        ("RSR-2", "shared by 2 arms"),
        ("RPR-2", "a"),
        ("RPR-2", "b"),
        ("RSR-2…RPR-2", "c"),
    ]
    assert [b.parent for b in first] == [None, first[0].key, first[1].key, first[1].key, first[0].key]
    assert len(tree) == 10
    assert not {b.key for b in first} & {b.key for b in tree if b.seed == 7}
    ends = {run for b in tree for run in b.ends}
    assert ends == {(a, s) for a in "abc" for s in (0, 7)}
    assert sum(b.estimate.attempts for b in first) < sum(
        sum(b.estimate.attempts for b in branches({("x", 0): c})) for (_, s), c in checked(given_).items() if s == 0
    )


def test_an_arm_that_ends_where_another_goes_on_has_a_branch_of_its_own() -> None:
    tree = branches(checked(spec(arm("short", last_stage="RSR-1"), arm("long"))))
    assert [(b.title, b.ends) for b in tree] == [("Base…RSR-1", (("short", 0),)), ("RPR-1…RPR-2", (("long", 0),))]


def test_a_key_knows_nothing_of_names_and_of_later_rounds() -> None:
    one = load_recipe("demo", name="one")
    two = load_recipe("demo", name="two", overrides={"rpr.1.lambda_turn": 0.5, "experiment": "x/y"})
    a, b = stage_keys(one), stage_keys(two)
    assert [x for x, _ in a] == [x for x, _ in b]
    assert [k for _, k in a][:-1] == [k for _, k in b][:-1]
    assert a[-1][1] != b[-1][1]
    assert stage_keys(load_recipe("demo", overrides={"evaluate.attempts_per_task": 2}))[0][1] != a[0][1]


def test_a_plan_may_be_cut_at_both_ends() -> None:
    names = [s.name for s in plan(load_recipe("demo", overrides={"fork": {"cycle": 1, "stage": "RSR-1"}}))]
    assert names == ["RPR-1", "RSR-2", "RPR-2"]
    assert [s.name for s in plan(load_recipe("demo", overrides={"last_stage": "RSR-1"}))] == ["Base", "RSR-1"]
    direct = plan(load_recipe("demo", overrides={"direct_ppo": True}))
    assert [(s.name, s.parent) for s in direct] == [("Base", None), ("RPR-1", "Base"), ("RPR-2", "RPR-1")]
    with pytest.raises(ConfigError, match="no such stage; it has Base, RSR-1"):
        plan(load_recipe("demo", overrides={"fork": {"cycle": 1, "stage": "RSR-9"}}))
    with pytest.raises(ConfigError, match="nothing is left"):
        plan(load_recipe("demo", overrides={"fork": {"cycle": 1, "stage": "RPR-2"}}))


# ------------------------------------------------------------------------------------------------ matched compute


@given(some.integers(200, 5000), some.floats(5, 60), some.floats(1.2, 40))
@settings(max_examples=60, deadline=None)
def test_a_matched_arm_spends_what_it_was_given(updates: int, per_attempt: float, attempts_per_update: float) -> None:
    goal = Spent(
        attempts=0, tokens=round(updates * attempts_per_update * per_attempt) + 100_000, updates=updates, by_phase={}
    )
    config = load_recipe("demo")
    found = matched(config, goal, per_attempt)
    rpr = found.rpr_of(1)
    assert (found.rounds, found.direct_ppo, rpr.calibrate) == (1, True, True)
    warm = round(384 / 8)
    spent_updates = warm + 4 + 2 * rpr.joint_steps
    spent_tokens = (384 + (4 + rpr.joint_steps) * rpr.over_sampling_batch_size) * per_attempt
    assert abs(spent_updates - updates) <= 1
    assert abs(spent_tokens - goal.tokens) <= (rpr.joint_steps + 5) * per_attempt  # half an attempt per batch
    assert rpr.keep_steps[-1] == rpr.joint_steps
    type(rpr).model_validate(rpr.model_dump())  # a config that a cycle would take


def test_a_goal_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be matched"):
        matched(load_recipe("demo"), Spent(attempts=1, tokens=100, updates=20, by_phase={}), 20.0)
