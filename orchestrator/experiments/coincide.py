"""Levels that are the same function of the data are refused: an experiment between them would measure nothing (spec §2.4)."""

from __future__ import annotations

from collections.abc import Mapping

from stages.advantage import Estimator, estimators_coincide
from stages.config import CycleConfig, RPRConfig
from stages.errors import ConfigError

TB = Estimator.TB_GAE
UNIT = "γ = λ = 1: every estimator telescopes to A_j = Σr − v_j, so TB-GAE (1, 1) is token GAE (1, 1) (spec §3.2)"
IGNORED = "clocks of an estimator that is not used"
ONE_SEGMENT = (
    "nothing is ever summarised (the harness `shell`, or compaction off): every hand-over is the same (spec §3.4)"
)
SAME_HARNESS = "the replay harness is the one that explores anyway"
NO_PARENT = "RPR-1 has no critic to inherit, so inheriting and warming up are the same there (spec §2.2)"
NO_SCALES = "this reward has no family scales, so recalibration, quantile and floor change nothing (spec §4)"


def canonical(config: CycleConfig) -> tuple[CycleConfig, tuple[str, ...]]:
    """The same experiment with everything that has no effect at its default, and why it has none."""
    reasons: list[str] = []
    rounds = []
    one_segment = config.rollout.harness == "shell" or config.rollout.compaction == "off"
    for round_ in range(1, config.rounds + 1):
        rpr, why = _rpr(config.rpr_of(round_), first=round_ == 1, one_segment=one_segment)
        rounds.append(rpr)
        reasons += why
    rsr = []
    for round_ in range(1, config.rounds + 1):
        own = config.rsr_of(round_)
        if own.replay.harness == config.rollout.harness:
            reasons.append(SAME_HARNESS)
            own = own.model_copy(update={"replay": own.replay.model_copy(update={"harness": None})})
        rsr.append(own)
    return config.model_copy(update={"rpr": tuple(rounds), "rsr": tuple(rsr)}), tuple(dict.fromkeys(reasons))


def _rpr(rpr: RPRConfig, *, first: bool, one_segment: bool) -> tuple[RPRConfig, list[str]]:
    changes: dict[str, object] = {}
    why: list[str] = []
    token = rpr.estimator is not TB
    per_turn = rpr.lambda_token_per_turn
    lam = rpr.clocks[1] if per_turn is None else per_turn
    if token and estimators_coincide((rpr.estimator, rpr.clocks[0], lam), (TB, 1.0, 1.0)):
        why.append(UNIT)
        changes |= {"estimator": TB, "gamma_turn": 1.0, "lambda_turn": 1.0}
        token = False
    unused = ("gamma_turn", "lambda_turn") if token else ("gamma_token", "lambda_token", "lambda_token_per_turn")
    defaults = {name: RPRConfig.model_fields[name].default for name in unused}
    if any(getattr(rpr, name) != default for name, default in defaults.items()):
        why.append(IGNORED)
    changes |= defaults
    if one_segment and rpr.handover != "full":
        why.append(ONE_SEGMENT)
        changes["handover"] = "full"
    if first and not rpr.inherit_critic:
        why.append(NO_PARENT)
        changes["inherit_critic"] = True
    reward = rpr.reward
    if not reward.kind.needs_scales and (plain := type(reward)(kind=reward.kind, progress=reward.progress)) != reward:
        why.append(NO_SCALES)
        changes["reward"] = plain
    return rpr.model_copy(update=changes), why


def refuse_coinciding(configs: Mapping[str, CycleConfig]) -> None:
    """Raises ConfigError for two arms that are given alike or come out alike. `configs`: arm -> its cycle, same seed."""
    seen: dict[str, tuple[str, CycleConfig]] = {}
    for arm, config in configs.items():
        form, reasons = canonical(config)
        key = bare(form).model_dump_json()
        if (other := seen.get(key)) is None:
            seen[key] = (arm, config)
            continue
        before, theirs = other
        if bare(theirs) == bare(config):
            raise ConfigError(
                f"arms {before!r} and {arm!r} differ in nothing; an experiment between them measures only noise"
            )
        because = tuple(dict.fromkeys((*reasons, *canonical(theirs)[1]))) or ("their settings come to the same",)
        raise ConfigError(
            f"arms {before!r} and {arm!r} are the same experiment: "
            + "; ".join(because)
            + ". Change or drop one of them."
        )


def bare(config: CycleConfig) -> CycleConfig:
    """Without what names a cycle and does not change it."""
    return config.model_copy(update={"name": "x", "recipe": "", "experiment": "", "fork": None})


def refuse_impossible(arm: str, config: CycleConfig) -> None:
    """Raises ConfigError for a reset that has nothing to reset to."""
    for round_ in range(1, config.rounds + 1):
        if config.rpr_of(round_).critic_reset == "seed" and round_ == 1:
            raise ConfigError(
                f"arm {arm!r}: rpr.0.critic_reset = seed: φ_seed is made by RPR-1's own warm-up (spec §2.2), so only a later "
                "round can be reset to it; set it in rpr.1"
            )
