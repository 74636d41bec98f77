"""Reward audit of 1,000,000 trajectories (spec §4.4) against a loop over rows as one writes it in a notebook.

    python benchmarks/audit.py               # 1,000,000 rows; claims: at most 10 s and 1.5 GB
    python benchmarks/audit.py --rows 50000

From columns of plain Python values to the finished report: encoding and checks, fitted family scales, recalibration,
and four formulas overall and per family with their lists of failures. The loop does the same for FDR and SPR on a part
of the rows, one row at a time (pandas' `iterrows` where pandas is installed, tuples otherwise), and its figures must
equal the report's; its time is scaled to all rows. Exits with 1 when a claim does not hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from stages.domain import FamilyScale
from stages.outcomes import Outcomes
from stages.recalibration import family_calibrations, recalibrate
from stages.rescore import RewardAudit, rescore
from stages.rewards import RewardKind, RewardModel, fit_scales

FAMILIES = 46  # as many as the paper profiles


def columns(n: int, seed: int = 0) -> dict[str, list[Any]]:
    """Plain Python columns, as an import from a database or a file gives them."""
    rng = np.random.default_rng(seed)
    code = rng.integers(0, FAMILIES, n)
    checks = 3 + code % 18
    skill = rng.beta(0.8, 0.8, n)
    progress = rng.binomial(checks, skill)
    strict = (progress == checks) & (rng.random(n) < 0.95)
    reported = rng.random(n) > 0.02
    return {
        "id": [f"trajectory-{i:07d}" for i in range(n)],
        "family": [f"family-{c:02d}" for c in code.tolist()],
        "progress": progress.tolist(),
        "strict": strict.tolist(),
        "has_report": reported.tolist(),
        "only_gate_failed": ((progress == checks) & ~strict).tolist(),
        "turns": rng.integers(1, 120, n).tolist(),
    }


def audit(table: dict[str, list[Any]]) -> tuple[RewardAudit, dict[str, float], float]:
    """The report, D_f by family, and the seconds that encoding and checking the columns took."""
    start = time.perf_counter()
    outcomes = Outcomes.of(
        family=table["family"],
        progress=table["progress"],
        strict=table["strict"],
        has_report=table["has_report"],
        only_gate_failed=table["only_gate_failed"],
        turns=table["turns"],
        ids=table["id"],
    )
    encoded_s = time.perf_counter() - start
    scales = fit_scales(outcomes)
    again = recalibrate(scales, family_calibrations(scales, outcomes))
    models = {
        "count": RewardModel(kind=RewardKind.COUNT),
        "binary": RewardModel(kind=RewardKind.BINARY),
        "fdr": RewardModel(kind=RewardKind.FDR, scales=scales),
        "spr": RewardModel(kind=RewardKind.SPR, scales=scales),
        "spr, recalibrated": RewardModel(kind=RewardKind.SPR, scales=again),
    }
    return rescore(outcomes, models), {s.family: s.value for s in scales}, encoded_s


def loop(rows: Iterable[tuple[Any, ...]], scales: dict[str, float]) -> dict[str, dict[str, list[float]]]:
    """kind → family → [Σ R, Σ_fail R, failures with R ≥ 1], one row at a time."""
    out: dict[str, dict[str, list[float]]] = {k: defaultdict(lambda: [0.0, 0.0, 0]) for k in ("fdr", "spr")}
    for _, family, progress, strict, has_report, _, _ in rows:
        if has_report:  # a pandas row unpacks like a tuple
            scale, p = scales[family], progress
        else:
            family, scale, p = family + "/binary", 1.0, int(strict)
        for kind, reward in (("fdr", max(p / scale, 0.0)), ("spr", strict + p / (p + scale))):
            for group in (family, ""):
                sums = out[kind][group]
                sums[0] += reward
                if not strict:
                    sums[1] += reward
                    sums[2] += reward >= 1.0
    return out


def rows_of(table: dict[str, list[Any]], n: int) -> tuple[str, Iterable[tuple[Any, ...]]]:
    part = {name: column[:n] for name, column in table.items()}
    if importlib.util.find_spec("pandas"):
        import pandas

        return "pandas iterrows", (row for _, row in pandas.DataFrame(part).iterrows())
    return "loop over tuples", zip(*part.values(), strict=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    table = columns(args.rows)
    start = time.perf_counter()
    report, scales, encoded_s = audit(table)
    seconds = time.perf_counter() - start
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"{args.rows:,} trajectories, {len(report.outcomes.families)} families, {len(report.formulas)} formulas")
    for formula in report.formulas:
        s = formula.overall
        print(
            f"  {formula.label:18s} failure share {s.failure_share:.2%}  means {s.mean_success:.3f}/{s.mean_failure:.3f}"
            f"  failures >= 1: {s.failures_at_or_above_one:,}  gate only: {s.gate_only_failures:,}"
        )
    ok = seconds <= 10.0 and peak_gb <= 1.5
    print(
        f"  report {seconds:.2f} s (<= 10), of which columns {encoded_s:.2f} s; peak {peak_gb:.2f} GB (<= 1.5)   {'ok' if ok else 'FAILED'}"
    )

    part = min(args.rows, 50_000)
    small = rescore_part(table, part, scales)
    name, rows = rows_of(table, part)
    start = time.perf_counter()
    slow = loop(rows, scales)
    loop_s = (time.perf_counter() - start) * args.rows / part
    same = True
    for kind, groups in slow.items():
        for family, (total, failed, high) in groups.items():
            s = small[kind].by_family[family] if family else small[kind].overall
            same = same and high == s.failures_at_or_above_one
            same = same and np.allclose([total, failed], [s.reward_sum, s.failure_reward_sum], rtol=1e-9, atol=0)
    print(
        f"  {name} {loop_s:.1f} s for two formulas, scaled from {part:,} rows; figures {'equal' if same else 'DIFFER'}"
    )
    return 0 if ok and same else 1


def rescore_part(table: dict[str, list[Any]], n: int, scales: dict[str, float]) -> RewardAudit:
    """The report of the first n rows under the scales of all of them."""
    fixed = tuple(FamilyScale(family=f, value=d, attempts=0) for f, d in scales.items())
    outcomes = Outcomes.of(
        family=table["family"][:n],
        progress=table["progress"][:n],
        strict=table["strict"][:n],
        has_report=table["has_report"][:n],
    )
    return rescore(
        outcomes,
        {k.value: RewardModel(kind=k, scales=fixed) for k in (RewardKind.FDR, RewardKind.SPR)},
    )


if __name__ == "__main__":
    sys.exit(main())
