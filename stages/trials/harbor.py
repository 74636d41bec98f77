"""Harbor job folders: which trials there are, and what one trial says about itself.

JOB/config.json                     the job, optional
JOB/TRIAL/result.json               the trial; verifier/{reward.txt,reward.json,ctrf.json}, agent/trajectory.json
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.domain import CheckStatus, EndReason, Stratum, Trajectory, Verdict
from stages.errors import TrialError
from stages.trials.ctrf import read_checks
from stages.trials.files import ARCHIVES, printable, read_json, read_text
from stages.trials.transcript import Transcript

RESULT_LIMIT, REWARD_LIMIT, CONFIG_LIMIT = 4 << 20, 4096, 4 << 20
OWN = "terminal-rsi"  # the producer that our export names
DEPTH = 4  # folders of job folders are searched this deep
Name = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$")]
Count = Annotated[int, Field(ge=0, lt=2**31)]
SECRET = re.compile(r"key|token(?!s)|secret|passw|auth|credential|url|base|host|path|dir", re.IGNORECASE)


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class _ModelInfo(_Lenient):
    name: str = ""
    provider: str | None = None


class _AgentInfo(_Lenient):
    name: Name
    version: str | None = None
    model_info: _ModelInfo | None = None


class _AgentResult(_Lenient):
    n_output_tokens: Count | None = None
    metadata: dict[str, Any] | None = None


class _VerifierResult(_Lenient):
    rewards: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None


class _ExceptionInfo(_Lenient):
    exception_type: str = ""


class _Timing(_Lenient):
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def seconds(self) -> float | None:
        if self.started_at is None or self.finished_at is None:
            return None
        if (self.started_at.tzinfo is None) != (self.finished_at.tzinfo is None):
            return None
        return max((self.finished_at - self.started_at).total_seconds(), 0.0)


class _Result(_Timing):
    id: Name | None = None
    task_name: Name
    trial_name: Name
    source: Name | None = None
    task_checksum: Name | None = None
    config: dict[str, Any] = {}
    agent_info: _AgentInfo
    agent_result: _AgentResult | None = None
    verifier_result: _VerifierResult | None = None
    exception_info: _ExceptionInfo | None = None
    agent_execution: _Timing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What `result.json` says, without checks and transcript."""

    folder: Path
    job: Path  # the folder that holds the trial
    id: str  # Harbor's own, or name and start where an old Harbor gave none
    name: str
    task: str
    task_digest: str  # Harbor's checksum; "" when it gave none
    source: str  # dataset; "" for tasks of a folder
    agent: str
    agent_version: str
    model: str
    settings: Mapping[str, float | int | str]  # harness and limits, without what may be secret or names a machine
    verdict: Verdict
    end_reason: EndReason
    started: str  # ISO, orders attempts; "" unknown
    duration_s: float
    output_tokens: int | None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Trial folders below one root, and what cannot be one."""

    trials: tuple[Path, ...] = ()
    problems: tuple[TrialError, ...] = field(default=())


def find_trials(root: Path) -> Found:
    """Every trial folder of a job folder, of a folder of job folders, or `root` itself, in order of path.

    A folder with `agent/` or `verifier/` but without `result.json` is an unfinished trial and reported, so are links and
    archives. Raises TrialError when `root` is no folder.
    """
    if root.suffix.lower() in ARCHIVES and root.is_file():
        raise TrialError(f"{root} is an archive; unpack it yourself (nothing is unpacked here) and name the folder")
    if not root.is_dir():
        raise TrialError(f"{root} is no folder; name a Harbor job folder, such as jobs/2026-01-31__12-00-00")
    trials: list[Path] = []
    problems: list[TrialError] = []
    for path in _walk(root, 0, problems):
        trials.append(path)
    return Found(trials=tuple(trials), problems=tuple(problems))


def _walk(folder: Path, depth: int, problems: list[TrialError]) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError as error:
        problems.append(TrialError(f"{folder} cannot be listed: {error.strerror}"))
        return
    names = {e.name for e in entries}
    folders = [e for e in entries if e.is_dir(follow_symlinks=False)]
    parts = {e.name for e in folders} & {"agent", "verifier"}
    if "result.json" in names and (parts or _is_trial_result(folder, folders)):
        yield folder
        return
    if parts:
        problems.append(TrialError(f"{folder / 'result.json'} is missing: the trial was not finished"))
        return
    for entry in entries:
        if entry.is_symlink():
            problems.append(TrialError(f"{entry.path} is a symbolic link; links are not followed"))
        elif entry.name.lower().endswith(ARCHIVES) and entry.is_file(follow_symlinks=False):
            problems.append(TrialError(f"{entry.path} is an archive and was not opened; unpack it yourself"))
    for entry in folders:
        if depth < DEPTH:
            yield from _walk(Path(entry.path), depth + 1, problems)


def _is_trial_result(folder: Path, folders: list[os.DirEntry[str]]) -> bool:
    """A job writes a `result.json` too, beside its trials; a trial that failed early has neither agent nor verifier."""
    if any(os.path.lexists(os.path.join(e.path, "result.json")) for e in folders):
        return False
    try:
        document = read_json(folder, "result.json", RESULT_LIMIT)
    except TrialError:
        return True  # reported when it is read as a trial
    return not (isinstance(document, dict) and "n_total_trials" in document)


def read_trial(folder: Path) -> Trial:
    """What a trial says about itself. Raises TrialError naming the file and the field that is damaged."""
    path = folder / "result.json"
    document = read_json(folder, "result.json", RESULT_LIMIT)
    if document is None:
        raise TrialError(f"{path} is missing: the trial was not finished")
    try:
        result = _Result.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"]) or "the document"
        raise TrialError(f"{path}: {at}: {first['msg']}") from error
    rewards = result.verifier_result.rewards if result.verifier_result else None
    reward = None if rewards is None else _reward(rewards, path)
    written = _written_reward(folder)
    if reward is not None and written is not None and written != reward:
        raise TrialError(f"{folder / 'verifier'} says reward {written:g}, {path.name} says {reward:g}; one was changed")
    kind = result.exception_info.exception_type if result.exception_info else ""
    model = result.agent_info.model_info
    execution = result.agent_execution.seconds if result.agent_execution else None
    started = result.started_at.isoformat() if result.started_at else ""
    return Trial(
        folder=folder,
        job=folder.resolve().parent,
        id=result.id or f"{result.trial_name} {started}",
        name=result.trial_name,
        task=result.task_name,
        task_digest=result.task_checksum or "",
        source=result.source or "",
        agent=result.agent_info.name,
        agent_version=printable(result.agent_info.version or ""),
        model=printable(model.name if model else "") or "unknown model",
        settings=_settings(result),
        verdict=_verdict(reward, kind),
        end_reason=_own_end_reason(result.agent_result) or _end_reason(kind),
        started=started,
        duration_s=(execution if execution is not None else result.seconds) or 0.0,
        output_tokens=result.agent_result.n_output_tokens if result.agent_result else None,
        flags=("reward_without_verdict",) if reward is None and written is not None else (),
    )


def trajectory_of(
    trial: Trial,
    transcript: Transcript,
    *,
    id: str,
    attempt: int,
    suite: str,
    family: str,
    stratum: Stratum,
    checkpoint: str,
) -> Trajectory:
    """The attempt, with its checks and turns; no token arrays. Raises TrialError for a damaged check report."""
    checks = read_checks(trial.folder)
    failed = any(c.status is CheckStatus.FAILED for c in checks)
    disagrees = ("failed_checks_but_passed",) if trial.verdict is Verdict.PASSED and failed else ()
    return Trajectory(
        id=id,
        task_id=trial.task,
        family=family,
        stratum=stratum,
        attempt=attempt,
        seed=0,
        turns=transcript.turns,
        segments=(),
        checks=checks,
        end_reason=trial.end_reason,
        verdict=trial.verdict,
        weight_version=checkpoint,
        flags=(*trial.flags, *disagrees),
        duration_s=trial.duration_s,
        suite=suite,
    )


def dataset_versions(job: Path) -> dict[str, str]:
    """Dataset → its version, where a job's `config.json` names exactly one; {} without a readable one."""
    try:
        document = read_json(job, "config.json", CONFIG_LIMIT)
    except TrialError:
        return {}  # it would only have given the suite a longer name
    found: dict[str, set[str]] = {}
    datasets = document.get("datasets") if isinstance(document, dict) else None
    for dataset in datasets if isinstance(datasets, list) else ():
        if isinstance(dataset, dict) and isinstance(dataset.get("name"), str):
            version = dataset.get("version") or dataset.get("ref")
            found.setdefault(dataset["name"], set()).add(version if isinstance(version, str) else "")
    return {name: v.pop() for name, v in found.items() if len(v) == 1 and "" not in v}


def _reward(rewards: Mapping[str, float], path: Path) -> float:
    value = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    if value is None:
        names = ", ".join(sorted(rewards)) or "none"
        raise TrialError(f"{path}: no reward among the rewards ({names}), so passing cannot be told")
    if not 0.0 <= value <= 1.0:
        raise TrialError(f"{path}: reward {value:g} is not between 0 and 1, so passing cannot be told")
    return value


def _written_reward(folder: Path) -> float | None:
    """What the verifier wrote, to be held against what the trial reports."""
    text = read_text(folder, "verifier/reward.txt", REWARD_LIMIT)
    if text is not None:
        try:
            return float(text)
        except ValueError as error:
            raise TrialError(f"{folder / 'verifier/reward.txt'} holds {text[:40]!r}, no number") from error
    document = read_json(folder, "verifier/reward.json", REWARD_LIMIT)
    if document is None:
        return None
    if not isinstance(document, dict) or not all(type(v) in (int, float) for v in document.values()):
        raise TrialError(f"{folder / 'verifier/reward.json'} is no object of numbers")
    try:
        rewards = {k: float(v) for k, v in document.items()}
    except OverflowError as error:
        raise TrialError(f"{folder / 'verifier/reward.json'} holds a number beyond all measure") from error
    return _reward(rewards, folder / "verifier/reward.json")


def _verdict(reward: float | None, exception: str) -> Verdict:
    """Strict: a partial reward is a failure. Without a reward there is no verdict, and no 0."""
    if reward is not None:
        return Verdict.PASSED if reward == 1.0 else Verdict.FAILED
    if exception.startswith(("Verifier", "Reward")):
        return Verdict.VERIFIER_ERROR
    if not exception or exception.startswith("Agent") or "Cancel" in exception:
        return Verdict.NONE  # the verifier never ran
    return Verdict.INFRA_ERROR


def _end_reason(exception: str) -> EndReason:
    if not exception or exception.startswith(("Verifier", "Reward")):
        return EndReason.DONE
    if exception == "AgentTimeoutError":
        return EndReason.TIME_LIMIT
    if "Cancel" in exception:
        return EndReason.CANCELLED
    return EndReason.CONTEXT_OVERFLOW if "ContextLength" in exception else EndReason.ERROR


def _own_end_reason(agent: _AgentResult | None) -> EndReason | None:
    """What our own export says beyond Harbor's words; None for everybody else's trials."""
    said = agent.metadata if agent and agent.metadata else {}
    reason = said.get("end_reason")
    return EndReason(reason) if said.get("producer") == OWN and reason in tuple(EndReason) else None


def _settings(result: _Result) -> dict[str, float | int | str]:
    """Harness and limits of one trial: what makes two evaluations comparable. The model is not a setting."""
    out: dict[str, float | int | str] = {"harness": result.agent_info.name}
    if result.agent_info.version:
        out["harness_version"] = printable(result.agent_info.version)
    config = result.config
    out |= _scalars(config, "", lambda key: key.endswith("timeout_multiplier"))
    agent, environment = config.get("agent"), config.get("environment")
    if isinstance(agent, dict):
        out |= _scalars(agent, "agent.", lambda key: key.endswith("_sec"))
        out |= _scalars(agent.get("kwargs"), "agent.", lambda key: not SECRET.search(key))
    if isinstance(environment, dict):
        out |= _scalars(environment, "environment.", lambda key: key == "type" or key.startswith("override_"))
    return out


def _scalars(values: Any, prefix: str, wanted: Callable[[str], object]) -> dict[str, float | int | str]:
    if not isinstance(values, dict):
        return {}
    out: dict[str, float | int | str] = {}
    for key, value in values.items():
        if isinstance(value, int | float | str) and wanted(key) and len(str(value)) <= 200:
            shown = str(value).lower() if isinstance(value, bool) else value
            out[printable(prefix + key)] = printable(shown) if isinstance(shown, str) else shown
    return out
