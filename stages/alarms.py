"""Alarms on a step's metrics: which limits it breaks (spec §5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmLimit:
    """A logged metric above `limit` (or not finite) pages somebody, or stops the phase."""

    metric: str
    limit: float
    stop: bool = False
    words: str = ""  # said behind the value, where name and limit say little


EV_STALE = "critic/stale_steps"  # joint steps in a row with EV < 0
SCALES_DRIFTED = (
    "reward/scales_drifted"  # families whose online scale has left the phase's start by more than its limit
)

# Limits are ours; the sources give none.
DEFAULT_ALARMS = (
    AlarmLimit(metric="train/ratio_max", limit=100.0),
    AlarmLimit(metric="train/ratio_p99", limit=3.0),
    AlarmLimit(metric="train/clip_high_negative", limit=0.01),
    AlarmLimit(metric="train/ppo_kl", limit=1.0, stop=True),
    AlarmLimit(metric="train/train_rollout_logprob_abs_diff", limit=0.1),
    AlarmLimit(metric="rollout/weight_versions", limit=1.0),  # a step's batch comes from one policy
    AlarmLimit(metric="train/pg_loss", limit=math.inf, stop=True),
    AlarmLimit(metric="critic/value_loss", limit=math.inf, stop=True),
    # present only once `ev_alarm_steps` are reached
    AlarmLimit(
        metric=EV_STALE, limit=0.0, words="joint steps in a row with EV < 0: the critic is worse than a constant"
    ),
    AlarmLimit(metric=SCALES_DRIFTED, limit=0.0, words="families have left the scale of the phase's start"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    metric: str
    value: float
    limit: float
    stop: bool
    words: str = ""

    def __str__(self) -> str:
        if self.words and math.isfinite(self.value):
            return f"{self.value:g} {self.words}"
        what = "is not finite" if not math.isfinite(self.value) else f"is {self.value:.4g}, over {self.limit:.4g}"
        return f"{self.metric} {what}" + ("; the phase stops" if self.stop else "")


def alarms(metrics: Mapping[str, float | None], limits: Sequence[AlarmLimit] = DEFAULT_ALARMS) -> list[Alarm]:
    """The limits that a step's metrics break (spec §5). A missing metric breaks none; one that is not finite always does."""
    out = []
    for rule in limits:
        value = metrics.get(rule.metric)
        if value is not None and (not math.isfinite(value) or value > rule.limit):
            out.append(Alarm(metric=rule.metric, value=value, limit=rule.limit, stop=rule.stop, words=rule.words))
    return out
