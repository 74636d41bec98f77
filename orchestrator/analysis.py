"""EV instruments and oversampling of a cycle from what is stored, and the published reference data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator import models as m
from orchestrator.memo import Memo
from orchestrator.store import Store
from orchestrator.store.analysis_queries import AnalysisQueries
from orchestrator.store.metrics import EV, Point
from stages.config import RPRConfig
from stages.domain import EndReason, Phase
from stages.oversampling import Finished, OversamplingReport, oversampling_report
from stages.reference_rows import Origin, ReferenceRow, Zone, reference_rows
from stages.values import EVPoint, Staleness, staleness

FAMILY, TURN = f"{EV}/family/", f"{EV}/turn/"
PATIENCE = RPRConfig().ev_alarm_steps

_SHIFTS: Memo[OversamplingReport] = Memo(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EVCurve:
    """Explained variance of one stage's critic, batch by batch (spec §3.5). A value of None is undefined, not 0."""

    stage_id: int
    stage: str
    arm: str
    points: tuple[EVPoint, ...]  # warm-up, calibration and joint updates in the order in which they ran
    by_family: Mapping[str, tuple[EVPoint, ...]]
    by_turn: Mapping[int, tuple[EVPoint, ...]]  # position of the turn, 0 first; the last cell holds all later ones
    alarm: Staleness | None  # the joint updates end with EV < 0 for `patience` steps
    stale_families: Mapping[str, Staleness]  # the same per family

    @property
    def last(self) -> EVPoint | None:
        """The newest batch whose EV is defined."""
        return next((p for p in reversed(self.points) if p.value is not None), None)


def ev_curves(
    store: Store, *, cycle_id: int | None = None, stage_ids: Sequence[int] = (), patience: int | None = None
) -> tuple[EVCurve, ...]:
    """The EV curve of every stage that has logged one, in the order of the cycle.

    `patience` as in `staleness`; None: what each stage's own recipe says.
    """
    found = store.metrics.curve([EV], cycle_id=cycle_id, stage_ids=stage_ids)
    stages = list(dict.fromkeys((p.stage_id, p.stage, p.arm) for p in found))
    parts: dict[int, list[Point]] = {stage: [] for stage, _, _ in stages}
    names = {n for stage in parts for n in store.metrics.names(stage) if n.startswith((FAMILY, TURN))}
    if names:
        for p in store.metrics.curve(sorted(names), stage_ids=list(parts)):
            parts[p.stage_id].append(p)
    return tuple(
        _curve(
            stage_id,
            stage,
            arm,
            [p for p in found if p.stage_id == stage_id],
            parts[stage_id],
            _patience(store, stage_id) if patience is None else patience,
        )
        for stage_id, stage, arm in stages
    )


def _patience(store: Store, stage_id: int) -> int:
    stage = store.stages.get(stage_id)
    return rpr_setting(store.cycles.get(stage.cycle_id).config, stage, "ev_alarm_steps") or PATIENCE


def rpr_setting(config: Mapping[str, object], stage: m.Stage, name: str) -> int | None:
    """A number of the RPR recipe of a stage's round, as its cycle was configured; None where it says none."""
    found = config.get("rpr")
    rounds = found if isinstance(found, list) else [found]
    own = rounds[min(stage.round, len(rounds)) - 1] if rounds else None
    value = own.get(name) if isinstance(own, dict) else None
    return value if isinstance(value, int) else None


def _curve(
    stage_id: int, stage: str, arm: str, total: Sequence[Point], parts: Sequence[Point], patience: int
) -> EVCurve:
    points = tuple(_point(p) for p in total)
    families: dict[str, list[EVPoint]] = {}
    turns: dict[int, list[EVPoint]] = {}
    for p in parts:
        if p.name.startswith(FAMILY):
            families.setdefault(p.name.removeprefix(FAMILY), []).append(_point(p))
        else:
            turns.setdefault(int(p.name.removeprefix(TURN)), []).append(_point(p))
    alarms = {f: staleness(own, patience=patience) for f, own in sorted(families.items())}
    return EVCurve(
        stage_id=stage_id,
        stage=stage,
        arm=arm,
        points=points,
        by_family={f: tuple(own) for f, own in sorted(families.items())},
        by_turn={t: tuple(own) for t, own in sorted(turns.items())},
        alarm=staleness(points, patience=patience),
        stale_families={f: a for f, a in alarms.items() if a is not None},
    )


def _point(p: Point) -> EVPoint:
    return EVPoint(phase=p.phase, step=p.step, value=p.value)


def alarm_text(alarm: Staleness) -> str:
    """One sentence for a banner."""
    return (
        f"EV was below 0 in {alarm.steps} {alarm.phase.value} steps in a row ({alarm.first_step} to {alarm.last_step}, "
        f"lowest {alarm.lowest:.2f}): the critic predicts worse than a constant. Recalibrate it or stop the stage."
    )


# ------------------------------------------------------------------------------------------------ oversampling


def oversampling(store: Store, stage_id: int, *, phase: Phase = Phase.JOINT, batch: int) -> OversamplingReport:
    """Which attempts of a phase were kept and what dropping the others has shifted (spec §7); `batch` is its global
    batch size. Raises EvaluationError without a step.
    """
    rows = [tuple(row) for row in AnalysisQueries(store).by_step(stage_id, phase)]
    key = (stage_id, batch, hash(tuple(rows)))  # the bootstrap over every family takes a second
    if (known := _SHIFTS.get(key)) is not None:
        return known
    steps: dict[int, list[Finished]] = {}
    for step, attempt, family, verdict, strict, turns, tokens, end in rows:
        steps.setdefault(step, []).append(
            Finished(
                id=attempt,
                family=family,
                turns=turns,
                tokens=tokens,
                passed=strict,
                counts=verdict.counts,
                cut=end is EndReason.CANCELLED,
            )
        )
    return _SHIFTS.put(key, oversampling_report([steps[s] for s in sorted(steps)], batch=batch))


# ------------------------------------------------------------------------------------------------ reference data


def load_reference(store: Store) -> int:
    """Store the reports' published figures (spec §8); loading them again replaces them. Returns how many."""
    rows = [_reference(r) for r in reference_rows()]
    store.references.load(rows)
    return len(rows)


def _reference(r: ReferenceRow) -> m.ReferenceRow:
    """A stratum stands in the metric, as a row is known by source, label, suite and metric."""
    return m.ReferenceRow(
        source=r.report,
        label=f"{r.system} {r.checkpoint}".strip(),
        suite=r.suite,
        metric=f"{r.metric}/{r.stratum}" if r.stratum else r.metric,
        value=r.value,
        numerator=r.passed,
        denominator=r.of,
        harness="the report's own" if r.zone is Zone.SAME_HARNESS else "other or unknown",
        derived=r.origin is not Origin.PRINTED,
        note=r.note if r.origin is Origin.PRINTED else f"{r.origin.value}: {r.note}",
    )
