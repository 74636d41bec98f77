"""Reward audits on stored trajectories: choose a fixed set, re-score it, store the result with the set's digest (spec §4.4)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from orchestrator import models as m
from orchestrator.store import Store, TrajectoryFilter
from orchestrator.store.analysis_queries import AnalysisQueries
from stages.domain import FamilyScale
from stages.errors import ConfigError
from stages.outcomes import Outcomes
from stages.recalibration import FamilyCalibration, family_calibrations, recalibrate, scale_drift
from stages.rescore import FormulaAudit, RewardAudit, histogram, refuse_empty, rescore
from stages.rewards import Progress, RewardKind, RewardModel, fit_scales

FIT = "fit"
GIVEN = "given:"
RAW, NET_OF_NOP = Progress.RAW, Progress.NET_OF_NOP
LISTED = 500  # failures per list in the row; the artifact holds all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSpec:
    """What is audited and how."""

    where: TrajectoryFilter
    formulas: tuple[RewardKind, ...] = (RewardKind.FDR, RewardKind.SPR)
    scales: str = FIT  # "fit" on the set itself, or "given:CYCLE/STAGE", "given:FILE.json"
    given: tuple[
        FamilyScale, ...
    ] = ()  # scales as values; go before `scales`, which then only names where they are from
    recalibrated: bool = False  # SPR uses D'_f = c_f · D_f, with c_f from the set (spec §4.5)
    progress: Progress = Progress.RAW
    name: str = ""


def parse_formulas(words: str) -> tuple[RewardKind, ...]:
    """`fdr,spr` → kinds, each once. Raises ConfigError for an unknown one."""
    out: list[RewardKind] = []
    for word in (w.strip().lower() for w in words.split(",")):
        if word not in set(RewardKind):
            raise ConfigError(f"unknown formula {word!r}; choose among {', '.join(RewardKind)}, separated by commas")
        if RewardKind(word) not in out:
            out.append(RewardKind(word))
    return tuple(out)


def run_audit(store: Store, spec: AuditSpec, *, created_by: str = "cli") -> m.Audit:
    """Re-scores the set and stores the audit. Raises RewardError for an empty set, ConfigError for unusable scales."""
    outcomes = load_outcomes(store, spec.where, with_gates=RewardKind.COUNT in spec.formulas)
    refuse_empty(outcomes)
    scales = _scales(store, spec, outcomes) if any(k.needs_scales for k in spec.formulas) else ()
    dense = scales
    calibrations: tuple[FamilyCalibration, ...] = ()
    if spec.recalibrated and scales:
        calibrations = family_calibrations(scales, outcomes, progress=spec.progress)
        dense = recalibrate(scales, calibrations)
    frozen = spec.scales != FIT or bool(spec.given)
    drift = scale_drift(scales, fit_scales(outcomes, progress=spec.progress)) if frozen and scales else ()
    models = {
        kind.value: RewardModel(
            kind=kind,
            scales=() if not kind.needs_scales else dense if kind is RewardKind.SPR else scales,
            progress=spec.progress,
        )
        for kind in spec.formulas
    }
    audit = rescore(outcomes, models)
    artifact = store.artifacts.put_text(json.dumps(_lists(audit, None), ensure_ascii=False))
    with store.transaction():
        store.files.register([artifact])
        return store.audits.add(
            m.Audit(
                name=spec.name or _told(spec.where),
                cycle_id=spec.where.cycle_id,
                stage_id=spec.where.stage_id,
                selection=_selection(spec),
                set_digest=set_digest(outcomes),
                formulas=[_formula(f) for f in audit.formulas],
                result={
                    "attempts": len(outcomes) + outcomes.masked,
                    "verdicts": len(outcomes),
                    "masked": outcomes.masked,
                    "rows": list(audit.rows()),
                    "histograms": {f.label: histogram(audit, f) for f in audit.formulas},
                    "calibrations": [asdict(x) for x in calibrations],
                    "drift": [asdict(x) for x in drift],
                    "lists": _lists(audit, LISTED),
                },
                artifact=artifact.sha256,
                created_by=created_by,
            )
        )


def load_outcomes(store: Store, where: TrajectoryFilter, *, with_gates: bool = True) -> Outcomes:
    """Columns of the stored attempts that have a verdict; the others are counted in `masked`."""
    queries = AnalysisQueries(store)
    c, masked = queries.scored_columns(where)
    gates = queries.passed_gates(where) if with_gates else {}
    return Outcomes.of(
        family=c["family"],
        progress=c["progress"],
        strict=c["strict"],
        assertions=[p + gates.get(i, 0) for i, p in zip(c["id"], c["progress"], strict=True)]
        if gates
        else c["progress"],
        nop_progress=c["nop_progress"],
        has_report=[n > 0 for n in c["n_checks"]],
        only_gate_failed=c["only_gate_failed"],
        turns=c["n_turns"],
        strata=c["stratum"],
        ids=c["id"],
        masked=masked,
    )


def set_digest(outcomes: Outcomes) -> str:
    """SHA-256 over the sorted ids and outcomes: two audits of one digest re-scored the same set."""
    o = outcomes
    lines = sorted(
        f"{o.id_of(i)}\0{o.family_of(i)}\0{int(o.strict[i])}\0{o.progress[i]}\0{int(o.only_gate_failed[i])}\n"
        for i in range(len(o))
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def failures(store: Store, audit: m.Audit) -> list[dict[str, Any]]:
    """Every failure with reward ≥ 1 and every gate-only failure, from the audit's artifact, as flat rows."""
    assert audit.artifact is not None
    lists = json.loads(store.artifacts.get_text(audit.artifact))
    return [{"formula": label, "list": which, **row} for label, both in lists.items() for which, own in both.items() for row in own]  # fmt: skip


def same_set(audits: Sequence[m.Audit]) -> bool:
    """True when all audits re-scored the same trajectories with the same outcomes, so that their figures compare."""
    return len({a.set_digest for a in audits}) == 1


# ------------------------------------------------------------------------------------------------ parts


def _scales(store: Store, spec: AuditSpec, outcomes: Outcomes) -> tuple[FamilyScale, ...]:
    if spec.given:
        return spec.given
    if spec.scales == FIT:
        return fit_scales(outcomes, progress=spec.progress)
    if not spec.scales.startswith(GIVEN) or spec.scales == GIVEN:
        raise ConfigError(f"scales {spec.scales!r}: use fit, given:CYCLE/STAGE or given:FILE.json")
    given = spec.scales.removeprefix(GIVEN)
    cycle, slash, stage = given.partition("/")
    if slash and cycle.isdecimal() and not Path(given).exists():
        row = stage_named(store, int(cycle), stage)
        assert row.id is not None
        scales = store.profiles.load(row.id)
        if not scales:
            raise ConfigError(f"stage {stage} of cycle {cycle} has profiled no scales; use fit or another stage")
        return scales
    try:
        return parse_scales(Path(given).read_text(encoding="utf-8"), given)
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror}") from error


def parse_scales(text: str, where: str) -> tuple[FamilyScale, ...]:
    """`{"family": 4.5, …}`, in checks. Raises ConfigError, naming `where`."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(document, dict) or not document:
        raise ConfigError(f'{where} is no object of scales, such as {{"files": 4.5}}')
    for family, value in document.items():
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{where}: the scale of {family!r} is {value!r}, no number above 0")
    return tuple(FamilyScale(family=f, value=float(v), attempts=0) for f, v in sorted(document.items()))


def stage_named(store: Store, cycle_id: int, name: str) -> m.Stage:
    """The stage of a cycle by name or index. Raises ConfigError when there is none."""
    stages = store.stages.of_cycle(cycle_id)
    for stage in stages:
        if name.lower() == stage.name.lower():
            return stage
    known = ", ".join(s.name for s in stages) or "none"
    raise ConfigError(f"cycle {cycle_id} has no stage {name!r} (it has {known})")


def _selection(spec: AuditSpec) -> dict[str, Any]:
    where = {f.name: getattr(spec.where, f.name) for f in fields(spec.where)}
    chosen = {k: v for k, v in where.items() if v is not None}
    return chosen | {"scales": spec.scales, "recalibrated": spec.recalibrated, "progress": spec.progress.value}


def _told(where: TrajectoryFilter) -> str:
    chosen = [f"{f.name} {getattr(where, f.name)}" for f in fields(where) if getattr(where, f.name) is not None]
    return ", ".join(chosen) or "every stored trajectory"


def _formula(formula: FormulaAudit) -> dict[str, Any]:
    return {
        "label": formula.label,
        "kind": formula.model.kind.value,
        "count_scale": formula.model.count_scale,
        "scales": [asdict(s) for s in formula.model.scales],
    }


def _lists(audit: RewardAudit, limit: int | None) -> dict[str, dict[str, list[dict[str, Any]]]]:
    return {
        f.label: {
            "failures_at_or_above_one": list(_rows(audit.outcomes, f, f.failures_at_or_above_one[:limit])),
            "gate_only_failures": list(_rows(audit.outcomes, f, f.gate_only_failures[:limit])),
        }
        for f in audit.formulas
    }


def _rows(o: Outcomes, formula: FormulaAudit, rows: Any) -> Iterator[dict[str, Any]]:
    for i in rows.tolist():
        yield {
            "trajectory": o.id_of(i),
            "family": o.family_of(i),
            "progress": int(o.progress[i]),
            "reward": float(formula.rewards[i]),
        }
