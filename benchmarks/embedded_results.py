"""The embedded loop over several seeds, measured on the held-out suites, with its control. Writes docs/embedded-results.md.

    python benchmarks/embedded_results.py --seeds 0 1 2 --tasks 120

Per seed: one cycle of the recipe `demo` in this process on a real embedded Postgres, then every retained checkpoint on
both held-out suites (tasks × 3 attempts), then the control: Base pre-trained on for as long as the loop took. Results are
kept per seed in HOME/results, so that an interrupted run continues. Nothing here chooses anything.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import numpy as np

from orchestrator.embedded import postgres
from orchestrator.inputs import shipped_model
from orchestrator.launch import create_cycle
from orchestrator.measure import evaluate_folder, suite_named
from orchestrator.models import CycleState
from orchestrator.recipes import load_recipe
from orchestrator.runner import run_cycle
from orchestrator.settings import Settings
from orchestrator.store import Store, schema
from stages.comparison import score_evaluation
from stages.domain import Phase
from stages.pretrain.build import BuildRecipe, continue_base
from stages.records import EvaluationDone

NAMES = ("Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2")
SUITES = ("heldout-names", "heldout-combinations")
EV = "critic/vf_explained_var"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=120, help="tasks per suite, three attempts each")
    parser.add_argument("--control-s", type=float, help="seconds of the control; default: what the seed's loop took")
    parser.add_argument("--home", type=Path, default=Path(".rsi-results"))
    parser.add_argument("--out", type=Path, default=Path("docs/embedded-results.md"))
    arguments = parser.parse_args()
    settings = Settings(home=arguments.home)
    (settings.home / "results").mkdir(parents=True, exist_ok=True)
    info = postgres.ensure(settings.home)
    store = Store.open(postgres.ensure_database(info, "rsi"), settings.artifacts)
    try:
        schema.upgrade(info.url("rsi"))
        found = [seed_result(store, settings, seed, arguments.tasks, arguments.control_s) for seed in arguments.seeds]
    finally:
        store.close()
        postgres.stop(settings.home)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(report(found, arguments.tasks, arguments.seeds), encoding="utf-8")
    print(f"written: {arguments.out}")


def seed_result(store: Store, settings: Settings, seed: int, tasks: int, control_s: float | None) -> dict:
    file = settings.home / "results" / f"seed-{seed}-{tasks}.json"
    if file.exists():
        return json.loads(file.read_text())
    config = load_recipe("demo", name=f"results, seed {seed}", overrides={"seed": seed})
    complete = [c for c in store.cycles.list(states=[CycleState.DONE]).items if c.name == config.name]
    cycle = complete[0] if complete else create_cycle(store, config, actor="benchmark")
    assert cycle.id is not None
    if not complete:
        run_cycle(store, settings, cycle.id)
        cycle = store.cycles.get(cycle.id)
    assert cycle.id is not None
    assert cycle.started_at is not None
    assert cycle.finished_at is not None
    wall = (cycle.finished_at - cycle.started_at).total_seconds()
    print(f"seed {seed}: loop {wall:.0f} s", flush=True)
    folders = {c.name: Path(c.path) for c in store.checkpoints.of_cycle(cycle.id) if c.retained}
    rows = {n: f / "actor" if (f / "actor").is_dir() else f for n, f in folders.items()}
    control = settings.home / f"control-{seed}"
    for line in continue_base(shipped_model(), control, BuildRecipe(seed=seed), seconds=control_s or wall):
        print(line, flush=True)
    rows["control"] = control / "control"
    scores: dict[str, dict[str, dict]] = {}
    for name, actor in rows.items():
        for suite in SUITES:
            done = evaluate_folder(config, actor, name, suite_named(suite, tasks, settings), attempts_per_task=3)
            scores.setdefault(name, {})[suite] = summary(done)
            print(f"seed {seed} {name} {suite}: {done.passed}/{done.verdicts}", flush=True)
    result = {"seed": seed, "wall_s": wall, "control_s": control_s or wall, "scores": scores, **facts(store, cycle.id)}
    file.write_text(json.dumps(result, indent=1))
    return result


def summary(done: EvaluationDone) -> dict:
    interval = score_evaluation(done).by_verdicts.wilson
    return {
        "passed": done.passed,
        "verdicts": done.verdicts,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "turns": done.turns / max(1, done.attempts),
        "strata": strata(done),
        "per_task": {t.task_id: sum(v.value == "passed" for v in t.verdicts) / len(t.verdicts) for t in done.tasks},
    }


def strata(done: EvaluationDone) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for task in done.tasks:
        row = found.setdefault(task.stratum, [0, 0])
        row[0] += sum(v.value == "passed" for v in task.verdicts)
        row[1] += sum(v.counts for v in task.verdicts)
    return found


def facts(store: Store, cycle_id: int) -> dict:
    """EV curves, replay success by arm, selections, as the cycle recorded them."""
    out: dict = {"ev": {}, "replays": {}, "kept": {}}
    for stage in store.stages.of_cycle(cycle_id):
        assert stage.id is not None
        for phase in (Phase.WARMUP, Phase.CALIBRATE, Phase.JOINT):
            steps = store.metrics.steps(stage.id, phase)
            if steps:
                out["ev"][f"{stage.name} {phase.value}"] = [steps[s].get(EV) for s in sorted(steps)]
        phases = store.stages.phases(stage.id)
        if Phase.REPLAY in phases:
            out["replays"][stage.name] = phases[Phase.REPLAY].facts
        for phase in (Phase.DISTIL, Phase.JOINT):
            if row := store.selections.get(stage.id, phase):
                out["kept"][stage.name] = row.chosen
    return out


def report(found: list[dict], tasks: int, seeds: list[int]) -> str:
    lines = [
        "# The embedded loop, measured",
        "",
        f"Command: `python benchmarks/embedded_results.py --seeds {' '.join(map(str, seeds))} --tasks {tasks}` "
        f"(recipe `demo`, torch {metadata.version('torch')}, {platform.machine()}, two cores).",
        "",
        f"{len(found)} seeds; {tasks} tasks × 3 attempts per suite, temperature 0.6, top-p 0.95. Rates are k/verdicts; intervals are "
        "95 % Wilson, widened for attempts of one task. The suites were not used to choose anything: settings were tuned on "
        "tasks generated from the validation names, steps and distillations are kept by the protected validation suite. "
        "Base is the candidate of its pre-training recipe that did best on that suite. Control: Base pre-trained on, on its "
        "own corpus at its last learning rate, for as long as the loop of that seed took (below).",
        "",
    ]
    for suite in SUITES:
        lines += [f"## {suite}", "", table(found, suite), "", rises(found, suite), "", by_stratum(found, suite), ""]
    lines += ["## Explained variance", "", ev_table(found), "", "## Runbooks", "", replay_table(found), ""]
    walls = ", ".join("{wall_s:.0f} s (seed {seed})".format(**r) for r in found)
    controls = ", ".join("{control_s:.0f} s (seed {seed})".format(**r) for r in found)
    lines += [f"Loop wall time: {walls}. Control: {controls}.", ""]
    return "\n".join(lines)


def rate(row: dict) -> float:
    return row["passed"] / row["verdicts"]


def table(found: list[dict], suite: str) -> str:
    head = "| checkpoint | " + " | ".join(f"seed {r['seed']}" for r in found) + " | mean over seeds | turns |"
    lines = [head, "|---|" + "---|" * (len(found) + 2)]
    for name in (*NAMES, "control"):
        cells = []
        for r in found:
            s = r["scores"][name][suite]
            cells.append(
                f"{100 * rate(s):.1f} % ({s['passed']}/{s['verdicts']}) [{100 * s['low']:.1f}, {100 * s['high']:.1f}]"
            )
        rates = np.array([rate(r["scores"][name][suite]) for r in found])
        error = f" ± {100 * rates.std(ddof=1) / np.sqrt(len(rates)):.1f}" if len(rates) > 1 else ""
        turns = np.mean([r["scores"][name][suite]["turns"] for r in found])
        lines.append(f"| {name} | {' | '.join(cells)} | {100 * rates.mean():.1f} %{error} | {turns:.1f} |")
    return "\n".join(lines) + "\n\n± is one standard error over seeds."


def rises(found: list[dict], suite: str) -> str:
    lines = ["| step | " + " | ".join(f"seed {r['seed']}" for r in found) + " | mean | paired 95 % (tasks and seeds) |"]
    lines.append("|---|" + "---|" * (len(found) + 2))
    pairs = [*pairwise(NAMES), ("Base", "RPR-2"), ("Base", "control"), ("control", "RPR-2")]
    for before, after in pairs:
        deltas = [rate(r["scores"][after][suite]) - rate(r["scores"][before][suite]) for r in found]
        low, high = paired(found, suite, before, after)
        cells = " | ".join(f"{100 * d:+.1f}" for d in deltas)
        lines.append(
            f"| {before} → {after} | {cells} | {100 * float(np.mean(deltas)):+.1f} pp | [{100 * low:+.1f}, {100 * high:+.1f}] |"
        )
    return "\n".join(lines)


def paired(found: list[dict], suite: str, before: str, after: str) -> tuple[float, float]:
    """Bootstrap over tasks, and over seeds within each draw."""
    tasks = sorted(found[0]["scores"][before][suite]["per_task"])
    delta = np.array(
        [
            [r["scores"][after][suite]["per_task"][t] - r["scores"][before][suite]["per_task"][t] for t in tasks]
            for r in found
        ]
    )
    rng = np.random.default_rng(0)
    seeds, columns = delta.shape
    draws = [delta[rng.integers(0, seeds, seeds)][:, rng.integers(0, columns, columns)].mean() for _ in range(4000)]
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def by_stratum(found: list[dict], suite: str) -> str:
    names = list(found[0]["scores"]["Base"][suite]["strata"])
    lines = ["| checkpoint (all seeds) | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for name in (*NAMES, "control"):
        cells = []
        for stratum in names:
            k, n = np.sum([r["scores"][name][suite]["strata"][stratum] for r in found], axis=0)
            cells.append(f"{100 * k / n:.0f} % ({k}/{n})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ev_table(found: list[dict]) -> str:
    lines = ["Each value is measured on a fresh batch before the critic trains on it (spec §3.5).", ""]
    lines += ["| seed | stage and phase | first | last | all |", "|---|---|---|---|---|"]
    for r in found:
        for key, curve in r["ev"].items():
            shown = [f"{v:.2f}" if v is not None else "—" for v in curve]
            lines.append(f"| {r['seed']} | {key} | {shown[0]} | {shown[-1]} | {' '.join(shown)} |")
    return "\n".join(lines)


def replay_table(found: list[dict]) -> str:
    lines = [
        "Replay success with the actor's own runbook, with none, and with another task's (strict passes / verdicts).",
        "",
    ]
    lines += ["| seed | stage | own | none | other | accepted | kept |", "|---|---|---|---|---|---|---|"]
    for r in found:
        for stage, f in r["replays"].items():
            arms = [f"{f[f'{a}_passed']}/{f[f'{a}_verdicts']}" for a in ("own", "none", "other")]
            lines.append(
                f"| {r['seed']} | {stage} | {' | '.join(arms)} | {f['accepted']} | {r['kept'].get(stage, '—')} |"
            )
        kept = ", ".join(f"{s} {k}" for s, k in r["kept"].items() if s.startswith("RPR"))
        lines.append(f"| {r['seed']} | steps kept | {kept} | | | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
