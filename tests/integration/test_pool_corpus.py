"""The pre-training corpus: real bash, deterministic, honest about success, disjoint from every reported suite."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from stages.errors import RsiError
from stages.harness.observation import tidy
from stages.pretrain import operators
from stages.pretrain.corpus import Episode, EpisodeKind, build_corpus, run_scripts
from stages.seeds import rng
from stages.tasks.chains import draw_task, holds_held_pair
from stages.tasks.families import FAMILIES
from stages.tasks.generate import PoolKind, generate_pool
from stages.tasks.names import STOP_WORDS, Partition, partition_of

NAME = re.compile(r"\b(?:[bdfgklmnprstvz][aeiou]){2}\b")
SIZES = {"n_act": 150, "n_plan": 70, "n_follow": 70}


@pytest.fixture(scope="module")
def corpus() -> list[Episode]:
    return build_corpus(seed=3, **SIZES)


def of(corpus: list[Episode], kind: EpisodeKind) -> list[Episode]:
    return [e for e in corpus if e.kind is kind]


def families_of(instruction: str) -> tuple[str, ...]:
    """Families of a chain, read back from its wording alone."""
    patterns = {
        name: [re.compile("^" + re.sub(r"\\{\w+\\}", r"\\S+", re.escape(w)) + "$") for w in family.wordings]
        for name, family in FAMILIES.items()
    }
    found = []
    for part in instruction.split(" then "):
        matching = [name for name, alternatives in patterns.items() if any(p.match(part) for p in alternatives)]
        assert matching, part
        # "make {f} containing {w}" and the like are unambiguous but for the file's kind
        found.append(matching[0])
        assert len(matching) == 1, (part, matching)
    return tuple(found)


def test_counts_kinds_and_shape(corpus: list[Episode]):
    assert [e.kind for e in corpus] == [EpisodeKind.ACT] * 150 + [EpisodeKind.PLAN] * 70 + [EpisodeKind.FOLLOW] * 70
    for episode in corpus:
        assert episode.turns[-1] == ("done", "")
        assert all(command and command != "done" for command, _ in episode.turns[:-1])
        assert all(len(observation) <= 64 for _, observation in episode.turns)
        assert bool(episode.runbook) is (episode.kind is not EpisodeKind.ACT)


def test_operators_are_of_mixed_quality(corpus: list[Episode]):
    act = of(corpus, EpisodeKind.ACT)
    assert 0.15 < sum(e.success for e in act) / len(act) < 0.5
    assert all(e.success for e in of(corpus, EpisodeKind.PLAN))
    follow = of(corpus, EpisodeKind.FOLLOW)
    assert 0.8 < sum(e.success for e in follow) / len(follow) < 1
    observations = Counter(o for e in corpus for _, o in e.turns)
    assert any(o.startswith("err ") for o in observations), "commands really failed"
    assert any(" ; " in o for o in observations), "commands really printed"


def test_runbooks_never_hold_what_must_be_read(corpus: list[Episode]):
    for episode in corpus:
        public = set(NAME.findall(episode.instruction)) | STOP_WORDS
        assert set(NAME.findall(" ".join(episode.runbook))) <= public
        read_first = {"lookup", "modefile"} & set(families_of(episode.instruction))
        if episode.runbook:
            assert (" it" in " ".join(episode.runbook)) is bool(read_first)


def test_the_seed_decides_and_the_workers_do_not(corpus: list[Episode]):
    assert build_corpus(seed=3, workers=1, **SIZES) == corpus
    other = build_corpus(seed=4, n_act=20, n_plan=10, n_follow=10)
    assert not {e.instruction for e in other} & {e.instruction for e in corpus}
    assert build_corpus(seed=3, n_act=30, n_plan=0, n_follow=0) == corpus[:30], "a longer corpus only adds"


def test_success_agrees_with_the_verifier(tmp_path: Path):
    """The checks that run inside the transcript's shell say what tests/test.sh says."""
    import json
    import subprocess

    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    for i in range(36):
        spec = draw_task(rng("agree", i), "t", 1 + i % 4, Partition.TRAIN, lead=list(FAMILIES)[i % 12])
        plan = operators.act(spec, rng("agree", i, "act"), 0.8)
        ((turns, success),) = run_scripts([(spec, plan.commands)], tmp_path)
        app, logs = tmp_path / f"app{i}", tmp_path / f"logs{i}"
        app.mkdir()
        logs.mkdir()
        for path, text in spec.files.items():
            (app / path).write_text(text)
        seen = []
        for command in plan.commands[:-1]:
            done = subprocess.run(
                ["/bin/bash", "-c", command],
                cwd=app,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            seen.append((command, tidy(done.stdout, done.returncode, False)))
        assert [*seen, ("done", "")] == list(turns), "one bash per command prints the same"
        script = spec.test_script.replace("app=/app logs=/logs/verifier", f"app={app} logs={logs}")
        subprocess.run(["/bin/bash"], input=script.encode(), env=env, check=False)
        passed = json.loads((logs / "ctrf.json").read_text())["results"]["summary"]["failed"] == 0
        assert passed is success, (spec.instruction, plan.commands)


def test_no_reported_task_name_or_combination_is_in_training(corpus: list[Episode]):
    pools = {kind: generate_pool(kind, 700, 0) for kind in PoolKind}
    seen = {e.instruction for e in corpus} | {
        s.instruction for kind in (PoolKind.TRAIN, PoolKind.VALIDATION) for s in pools[kind]
    }
    for kind in (PoolKind.HELDOUT_NAMES, PoolKind.HELDOUT_COMBINATIONS):
        assert not seen & {s.instruction for s in pools[kind]}

    for episode in corpus:
        text = " ".join([episode.instruction, *episode.runbook, *(x for turn in episode.turns for x in turn)])
        assert {partition_of(n) for n in set(NAME.findall(text)) - STOP_WORDS} == {Partition.TRAIN}
        assert not holds_held_pair(families_of(episode.instruction))
    for kind in (PoolKind.TRAIN, PoolKind.VALIDATION):
        assert not any(holds_held_pair(families_of(s.instruction)) for s in pools[kind])
    assert all(holds_held_pair(families_of(s.instruction)) for s in pools[PoolKind.HELDOUT_COMBINATIONS])


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = draw_task(rng("left", 0), "t", 2, Partition.TRAIN)
    list(run_scripts([(spec, operators.act(spec, rng("left")).commands)], tmp_path))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("stages.pretrain.corpus._transcript", lambda *_: "exit 3\n")
    with pytest.raises(RsiError, match="status 3"):
        list(run_scripts([(spec, ("ls", "done"))], tmp_path))
    assert list(tmp_path.iterdir()) == []
