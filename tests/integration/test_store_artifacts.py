"""The artifact store gives back what it was given, and says so when it cannot."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.artifacts import ArtifactStore
from orchestrator.models import ArtifactKind
from stages.domain import Boundary, CheckResult, CheckRole, CheckStatus, EndReason, Stratum, Trajectory, Turn, Verdict
from stages.errors import StoreError
from tests import factories

awkward = st.text(st.characters(codec=None), max_size=20)  # NUL, lone surrogates, everything
numbers = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def trajectories(draw: st.DrawFn, number: int) -> Trajectory:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = draw(
        st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.sampled_from(["policy", "summary"])), max_size=3)
    )
    turn = st.builds(
        Turn,
        index=st.integers(0, 99),
        action=awkward,
        observation=awkward,
        exit_code=st.none() | st.integers(-(2**40), 2**40),
        timed_out=st.booleans(),
        duration_s=numbers,
    )
    check = st.builds(
        CheckResult, id=awkward, role=st.sampled_from(CheckRole), status=st.sampled_from(CheckStatus), message=awkward
    )
    return Trajectory(
        id=f"{number}-{draw(awkward)}",
        task_id=draw(awkward),
        family=draw(awkward),
        stratum=draw(st.sampled_from(Stratum)),
        attempt=draw(st.integers(0, 100)),
        seed=draw(st.integers(0, 2**63 - 1)),
        turns=tuple(draw(st.lists(turn, max_size=3))),
        segments=tuple(factories.segment(rng, n, experts=e, kind=k) for n, e, k in kinds),
        checks=tuple(draw(st.lists(check, max_size=3))),
        end_reason=draw(st.sampled_from(EndReason)),
        verdict=draw(st.sampled_from(Verdict)),
        weight_version=draw(awkward),
        runbook_id=draw(st.none() | awkward),
        boundaries=draw(st.dictionaries(st.sampled_from(Boundary), st.integers(0, 9))),
        drift_tokens=draw(st.integers(0, 5)),
        flags=tuple(draw(st.lists(awkward, max_size=2))),
        duration_s=draw(numbers),
        nop_progress=draw(st.integers(0, 3)),
        raw_answers=tuple(draw(st.lists(awkward, max_size=3))),
        verifier_log=draw(awkward),
        suite=draw(awkward),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_chunk_comes_back_exactly(tmp_path: Path, data: st.DataObject) -> None:
    store = ArtifactStore(tmp_path)
    given_ = [data.draw(trajectories(n)) for n in range(data.draw(st.integers(0, 3)))]
    chunk = store.save_trajectories(given_)
    back = store.load_trajectories(chunk.key)
    assert len(back) == len(given_)
    assert all(factories.same(a, b) for a, b in zip(given_, back, strict=True))
    for trajectory in given_:  # by parts
        (one,) = store.load_trajectories(chunk.key, [trajectory.id])
        assert factories.same(one, trajectory)


def test_equal_content_has_one_key(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    chunk = [factories.trajectory(n) for n in range(3)]
    assert store.save_trajectories(chunk) == store.save_trajectories(list(chunk))
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 3


def test_on_any_fsspec_url() -> None:
    store = ArtifactStore("memory://rsi-artifacts-test")
    trajectory = factories.trajectory(1)
    chunk = store.save_trajectories([trajectory])
    assert factories.same(store.load_trajectories(chunk.key)[0], trajectory)
    assert factories.same(store.load_trajectories(chunk.key, [trajectory.id])[0], trajectory)


def test_texts_with_lone_surrogates(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    text = "a\x00b\ud800c"
    assert store.get_text(store.put_text(text).sha256) == text


def test_damage_and_absence_are_told_apart(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    stored = store.put(b"weights", ArtifactKind.FILE)
    assert store.exists(stored.sha256)
    (file,) = (p for p in tmp_path.rglob("*") if p.is_file())
    file.write_bytes(b"weighty")
    with pytest.raises(StoreError, match="damaged"):
        store.get(stored.sha256)
    file.unlink()
    assert not store.exists(stored.sha256)
    with pytest.raises(StoreError, match="is not in"):
        store.get(stored.sha256)
    with pytest.raises(StoreError, match="no artifact key"):
        store.get("../../etc/passwd")


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(tmp_path)

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(StoreError, match="No space left"):
        store.put(b"x" * 1000)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_unequal_arrays_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    good = factories.trajectory(1)
    bad = replace(good, segments=(replace(good.segments[0], loss_mask=np.zeros(3, bool)),))
    with pytest.raises(StoreError, match="different lengths"):
        ArtifactStore(tmp_path).save_trajectories([bad])
