"""One rank of a Megatron job: runs every case against the torch learner and writes what it measured.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python megatron_case.py CASES.json OUT.json

CASES.json: {"dense": folder, "moe": folder, "work": folder, "cases": [{"name", "model", "layout", "options", "parts"}]}.
Rank 0 writes OUT.json: {case name: {measure: number}}. Guarded, for dist_checkpointing starts helper processes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
CLIP = {"eps_clip": 0.3, "eps_clip_high": 5.0}


def shared_builders():
    """The conftest beside this file, which pytest does not import here."""
    spec = importlib.util.spec_from_file_location("learner_conftest", HERE / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replay_gap(learner, folder: Path, build) -> np.ndarray:
    """|log π_train − log π_infer| of every masked token: float32 sampler, this learner, the same weights (spec §6.3)."""
    batch = build.float32_sampler(folder, build.random_batch(220, seed=11, longest=96))
    learner.load(folder, None)
    found = learner.log_probs(batch)
    return np.concatenate([np.abs(f - s.rollout_log_probs)[s.loss_mask] for f, s in zip(found, batch, strict=True)])


def rpr_step(learner, folder: Path, work: Path, data: list, keep: bool = False) -> dict:
    """Four calibration updates and one joint step (spec §2.3), then what the models say."""
    from stages.backends.protocols import OptimConfig

    learner.load(folder, None)
    learner.init_critic()
    learner.start_phase(actor=OptimConfig(lr=2e-3), critic=OptimConfig(lr=5e-3, clip_grad=100.0))
    out = {"log_probs": np.concatenate(learner.log_probs(data[0]))}
    steps = [learner.critic_step(b, value_clip=4.0) for b in data[:5]]
    steps.append(learner.actor_step(data[4], **CLIP))
    out["steps"] = steps
    out["values"] = np.concatenate(learner.values(data[5]))
    out["warm"] = np.concatenate(learner.log_probs(data[5], temperature=0.7))
    if not keep:
        learner.start_phase(actor=None, critic=None)  # weights alone: moments take seconds to write
    learner.save(work)
    return out


def following(learner, data: list) -> dict[str, float]:
    """The joint update that follows a checkpoint, as three numbers that depend on weights and moments."""
    critic = [learner.critic_step(data[6], value_clip=4.0) for _ in range(2)]  # the second reads what the first wrote
    actor = [learner.actor_step(data[6], **CLIP) for _ in range(2)]
    return {
        "next": critic[1]["critic/grad_norm"],
        "next_actor": actor[1]["actor/grad_norm"],
        "next_loss": critic[1]["critic/value_loss"],
    }


def relative(a: dict[str, float], b: dict[str, float]) -> float:
    """Largest relative difference."""
    return max(abs(a[k] - b[k]) / abs(b[k]) for k in a)


def compare(a: dict, b: dict) -> dict[str, float]:
    """Largest differences; relative for gradient norms. `value_clip_fraction` counts ties of rounding and is left out."""
    found = {k: float(np.abs(a[k] - b[k]).max()) for k in ("log_probs", "values", "warm")}
    losses, norms = [0.0], [0.0]
    for x, y in zip(a["steps"], b["steps"], strict=True):
        assert set(x) == set(y)
        for key, value in x.items():
            if value is None or key == "critic/value_clip_fraction":
                assert (value is None) == (y[key] is None)
            elif key.endswith("grad_norm"):
                norms.append(abs(value - y[key]) / value)
            else:
                losses.append(abs(value - y[key]))
    return {**found, "metrics": max(losses), "grad_norm": max(norms)}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def update_gap(start: dict, a: dict, b: dict) -> float:
    """‖Δa − Δb‖ / ‖Δa‖ over all tensors."""
    assert set(a) == set(b)
    start = {k: start.get(k, torch.zeros_like(v)) for k, v in a.items()}
    apart = sum(float(((a[k] - b[k]).double() ** 2).sum()) for k in a)
    moved = sum(float(((a[k] - start[k]).double() ** 2).sum()) for k in a)
    return (apart / moved) ** 0.5


def routed(batch: list, layers: int) -> list:
    """Routes that a live router would rarely take; every third sequence has none."""
    rng = np.random.default_rng(3)
    out = []
    for i, s in enumerate(batch):
        shape = (len(s.tokens) - 1, layers)
        first = rng.integers(0, 4, shape)
        routes = np.stack([first, (first + 1 + rng.integers(0, 3, shape)) % 4], -1).astype(np.int32)
        out.append(s if i % 3 == 2 else replace(s, rollout_routed_experts=routes))
    return out


def gradients(learner, folder: Path, work: Path, data: list, dump) -> dict[str, torch.Tensor]:
    """Unclipped gradients of one update of each model, by Hugging Face name; `dump(which)` reads them."""
    from stages.backends.protocols import OptimConfig

    free = OptimConfig(lr=1e-3, clip_grad=1e9)
    learner.load(folder, None)
    learner.init_critic()
    learner.start_phase(actor=free, critic=free)
    learner.critic_step(
        data[0], value_clip=4.0
    )  # a zero head gives the backbone no gradient: look at the second update
    learner.start_phase(actor=free, critic=free)
    learner.critic_step(data[1], value_clip=4.0)
    learner.actor_step(data[1], **CLIP)
    return {f"{which} {k}": v for which in ("actor", "critic") for k, v in dump(which).items()}


def torch_gradients(learner, which: str) -> dict[str, torch.Tensor]:
    """After a phase's first update AdamW's first moment is (1 − β1) times the gradient."""
    from stages.backends.learner.critic import split_experts

    opt = learner._actor_opt if which == "actor" else learner._critic_opt
    found = {n: opt._adam.state[p]["exp_avg"] / 0.1 for n, p in opt._params.items()}
    return split_experts(found)


def dump_gradients(worker, which: str, folder: Path) -> None:
    """Every rank writes the gradients that it would export. Called like a method of the worker, on all ranks."""
    from safetensors.torch import save_file

    from stages.backends.learner.megatron import weights as mapping

    model = worker.actor if which == "actor" else worker.critic
    prefix = "model." if which == "actor" else "body."
    rank = torch.distributed.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    found = mapping.export(
        model.raw, vocab_size=model.facts.vocab_size, prefix=prefix, read=lambda p: p.main_grad.float()
    )
    save_file(found, folder / f"{rank}.safetensors")
    torch.distributed.barrier()


def replayed(learner, folder: Path, data: list) -> dict:
    from stages.backends.protocols import OptimConfig

    learner.load(folder, None)
    learner.start_phase(actor=OptimConfig(lr=2e-3), critic=None)
    live = np.concatenate(learner.log_probs(data[0]))
    unforced = learner.actor_step(data[0], **CLIP)  # the same batch routed live, then the weights anew
    learner.load(folder, None)
    learner.start_phase(actor=OptimConfig(lr=2e-3), critic=None)
    forced = routed(data[0], layers=2)
    return {
        "live": live,
        "forced": np.concatenate(learner.log_probs(forced)),
        "steps": [learner.actor_step(forced, **CLIP), learner.actor_step(routed(data[1], layers=2), **CLIP)],
        "unforced": unforced["train/pg_loss"],
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    plan, out_path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    work, build = Path(plan["work"]), shared_builders()
    data = [build.random_batch(11, seed=i, longest=60) for i in range(8)]

    import os

    from stages.backends.learner.megatron import cpu_shim
    from stages.backends.learner.megatron.layout import Layout
    from stages.backends.learner.megatron.learner import start
    from stages.backends.learner.torch_learner import TorchLearner
    from stages.errors import RsiError

    cpu_shim.install()
    from stages.backends.learner.megatron.worker import Worker

    Worker.dump_gradients = dump_gradients
    first = os.environ["RANK"] == "0"
    reference: dict[str, dict] = {}
    results: dict[str, dict] = {}
    for case in plan["cases"]:
        options = {"max_tokens_per_gpu": 100, "log_probs_chunk_size": 9, **case.get("options", {})}
        folder = Path(plan[case["model"]])
        try:
            learner = start(layout=Layout(**case["layout"]), **options)
        except RsiError as e:
            results[case["name"]] = {"refused": str(e)}
            continue
        if learner is None:
            continue
        found: dict = {}
        with learner:
            try:
                for part in case["parts"]:
                    key = f"{part}-{case['model']}"
                    if part == "step":
                        if key not in reference:
                            torch_learner = TorchLearner(max_tokens_per_gpu=100, num_threads=1)
                            reference[key] = rpr_step(torch_learner, folder, work / key, data)
                        mine = rpr_step(learner, folder, work / case["name"], data, "next" in case["parts"])
                        found |= compare(reference[key], mine)
                        actors = [weights(f / "actor") for f in (work / key, work / case["name"])]
                        critics = [weights(f / "critic") for f in (work / key, work / case["name"])]
                        found["actor_update"] = update_gap(weights(folder), *actors)
                        body = {k.replace("model.", "body.", 1): v for k, v in weights(folder).items()}
                        found["critic_update"] = update_gap(body, *critics)
                    elif part == "replay":
                        if key not in reference:
                            reference[key] = replayed(TorchLearner(max_tokens_per_gpu=100, num_threads=1), folder, data)
                        mine = replayed(learner, folder, data)
                        ref = reference[key]
                        found["replay_log_probs"] = float(np.abs(mine["forced"] - ref["forced"]).max())
                        found["replay_effect"] = float(np.abs(mine["forced"] - mine["live"]).max())
                        for k in (
                            "train/pg_loss",
                            "actor/grad_norm",
                            "train/replayed_token_share",
                            "train/route_flip_share",
                        ):
                            found[f"replay {k}"] = max(
                                abs(x[k] - y[k]) for x, y in zip(mine["steps"], ref["steps"], strict=True)
                            )
                        found["replay_loss_effect"] = abs(mine["steps"][0]["train/pg_loss"] - mine["unforced"])
                        found["flips"] = mine["steps"][0]["train/route_flip_share"]
                    elif part == "gradients":
                        if key not in reference:
                            plain = TorchLearner(max_tokens_per_gpu=100, num_threads=1)
                            reference[key] = gradients(
                                plain, folder, work, data, lambda which, of=plain: torch_gradients(of, which)
                            )

                        def dump(which: str, at: Path = work / f"grads-{case['name']}", of=learner) -> dict:
                            of._call("dump_gradients", which=which, folder=at / which)
                            return weights(at / which)

                        mine = gradients(learner, folder, work, data, dump)
                        ref = reference[key]
                        assert set(mine) == set(ref), set(mine) ^ set(ref)
                        apart = {k: float((mine[k] - ref[k]).norm() / ref[k].norm()) for k in ref}
                        found["gradients"], found["tensors"] = max(apart.values()), len(apart)
                    elif part == "save":
                        rpr_step(learner, folder, work / case["name"], data, keep=True)
                    elif part == "from-torch":  # the torch learner is killed after a joint step, this one goes on
                        if key not in reference:
                            plain = TorchLearner(max_tokens_per_gpu=100, num_threads=1)
                            rpr_step(plain, folder, work / f"{key}-saved", data, keep=True)
                            reference[key] = following(plain, data)
                        learner.restore(work / f"{key}-saved")
                        found["from_torch"] = relative(following(learner, data), reference[key])
                    elif part == "to-torch":  # after "step" and "next": the other way round
                        plain = TorchLearner(max_tokens_per_gpu=100, num_threads=1)
                        plain.restore(work / case["name"])
                        mine = {k: found[k] for k in ("next", "next_actor", "next_loss")}
                        found["to_torch"] = relative(following(plain, data), mine)
                    elif part == "next":  # after "step": the update that follows its checkpoint
                        found |= following(learner, data)
                    elif part.startswith("resume:"):
                        learner.restore(work / part.removeprefix("resume:"))
                        found |= following(learner, data)
                    elif part == "unsaved":  # every rank learns that rank 0 could not write, and none waits for ever
                        try:
                            learner.save(Path(sys.argv[1]) / "below-a-file")
                        except RsiError as e:
                            found["unsaved"] = str(e)
                        found["after"] = float(np.abs(np.concatenate(learner.values(data[6]))).max())
                    elif part == "gap":
                        found["gap"] = replay_gap(learner, folder, build).tolist()
                        replay = learner._worker.actor.replay
                        found["flips"] = replay.counts.flip_share if replay is not None else None
                    elif part == "frozen":
                        learner.load(work / case["name"] / "actor", work / case["name"] / "critic")
                        a = learner.save(work / "carried")
                        found["carried"] = float(a == learner.save(work / case["name"] / "again"))
            except RsiError as e:
                found["refused"] = str(e)
        results[case["name"]] = found
    if first:
        out_path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
