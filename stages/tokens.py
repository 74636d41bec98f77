"""TITO ledger: token in, token out (spec §6.1).

Training consumes the sampler's ids and log-probabilities, never re-rendered text. At each turn boundary the harness
renders the whole conversation anew, and the next prompt must extend what was sampled. Four outcomes, tried in order:

* strict prefix: the rendering tokenises to an extension of what we have;
* trimmed normalisation: it does but for a few blank or control tokens at the boundary, which stay as sampled;
* re-tokenised boundary: it does as text; only what follows is tokenised;
* new chunk: a new segment starts with the rendering as its prompt.

No repair touches a token that was sampled, so loss-region drift is 0 by construction, and `count_drift` recomputes it
from the stored raw answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from stages.backends.protocols import GenerateAnswer
from stages.domain import Boundary, Segment, Trajectory
from stages.errors import DriftError

MAX_TRIM_TOKENS = 4  # "bounded clean-up of the boundary"


class Codec(Protocol):
    """What the ledger needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Exact text, control tokens included."""
        ...

    def is_blank(self, token: int) -> bool:
        """True for control tokens and for tokens of white space only."""
        ...


class Ledger:
    """The tokens of one attempt, in segments."""

    def __init__(self, codec: Codec, prompt_text: str = "") -> None:
        self._codec = codec
        self.boundaries: dict[Boundary, int] = {}
        self._done: list[Segment] = []
        self._raw: list[str] = []
        self._open(codec.encode(prompt_text))

    def _open(self, prompt: list[int]) -> None:
        self._tokens = list(prompt)
        self._mask = [False] * len(prompt)
        self._log_probs = [0.0] * len(prompt)
        self._turn_ids = [-1] * len(prompt)
        self._versions: list[str] = []
        self._experts: list[np.ndarray] = []

    @property
    def input_ids(self) -> list[int]:
        """The next request's `input_ids`."""
        return self._tokens

    @property
    def has_sample(self) -> bool:
        """Whether the open segment holds a sampled token."""
        return any(self._mask)

    @property
    def segment_index(self) -> int:
        return len(self._done)

    @property
    def expert_rows(self) -> int:
        """Rows of routed experts already held: the next request's `routed_experts_start_len`."""
        return sum(len(e) for e in self._experts)

    def add_sample(self, answer: GenerateAnswer, turn: int) -> tuple[int, int]:
        """Append what was sampled, as it came. Returns its [start, end) in the open segment."""
        _require_log_probs(answer)
        start, n = len(self._tokens), len(answer.output_ids)
        self._tokens += answer.output_ids
        self._mask += [True] * n
        self._log_probs += answer.output_token_sampling_logprobs or answer.output_token_logprobs
        self._turn_ids += [turn] * n
        self._versions.append(answer.weight_version)
        if answer.routed_experts is not None:
            self._experts.append(answer.routed_experts)
        self._raw.append(_raw(self.segment_index, start, answer, trained=True))
        return start, len(self._tokens)

    def extend(self, rendered: str) -> Boundary:
        """Make the next prompt from the re-rendered conversation; returns which outcome it took."""
        have = self._tokens
        full = self._codec.encode(rendered)
        outcome = Boundary.NEW_CHUNK
        if len(full) > len(have) and full[: len(have)] == have:
            outcome, rest = Boundary.STRICT_PREFIX, full[len(have) :]
        elif (trimmed := self._trimmed(full)) is not None:
            outcome, rest = Boundary.TRIMMED, trimmed
        else:
            text = self._codec.decode(have)
            if len(rendered) > len(text) and rendered.startswith(text):
                outcome, rest = Boundary.RETOKENISED, self._codec.encode(rendered[len(text) :])
        if outcome is Boundary.NEW_CHUNK:
            self.close_segment()
            self._open(full)
        else:
            self._append_context(rest)
        self.boundaries[outcome] = self.boundaries.get(outcome, 0) + 1
        return outcome

    def start_segment(self, rendered: str) -> None:
        """A new prompt that need not extend anything: the first of an attempt, or what a summary left."""
        self.close_segment()
        self._open(self._codec.encode(rendered))

    def close_segment(self) -> None:
        """The open segment is whole; what comes next are sub-calls, or `start_segment`.

        What followed its last sampled token stays, as the state that was summarised; routes exist for sampled prefixes only.
        """
        if any(self._mask):
            whole = self._segment()
            self._done.append(whole if whole.rollout_routed_experts is None else _until_last_sample(whole))
        self._open([])

    def add_subcall(
        self, kind: str, prompt: Sequence[int], answer: GenerateAnswer, turn: int | None
    ) -> tuple[int, int]:
        """A sub-call as a segment of its own (spec §3.4), between two policy segments. Returns its sampled [start, end).

        `turn`: its index where sub-calls are trained on, one turn each; None: recorded with m = 0.
        """
        _require_log_probs(answer)
        start, n, trained = len(prompt), len(answer.output_ids), turn is not None
        log_probs = answer.output_token_sampling_logprobs or answer.output_token_logprobs
        self._raw.append(_raw(len(self._done), start, answer, trained=trained))
        self._done.append(
            Segment(
                tokens=np.asarray([*prompt, *answer.output_ids], dtype=np.int32),
                loss_mask=np.asarray([False] * start + [trained] * n, dtype=bool),
                rollout_log_probs=np.asarray(
                    [0.0] * start + [*(log_probs if trained else [0.0] * n)], dtype=np.float32
                ),
                turn_ids=np.asarray([-1] * start + [-1 if turn is None else turn] * n, dtype=np.int32),
                kind=kind,
                rollout_routed_experts=answer.routed_experts if trained else None,
                weight_versions=(answer.weight_version,),
            )
        )
        return start, start + n

    def _append_context(self, ids: Sequence[int]) -> None:
        self._tokens += ids
        self._mask += [False] * len(ids)
        self._log_probs += [0.0] * len(ids)
        self._turn_ids += [-1] * len(ids)

    def _trimmed(self, full: list[int]) -> list[int] | None:
        """Tokens to append when only blank tokens at the end of what we have differ from the rendering."""
        have = self._tokens
        for tail in range(1, min(MAX_TRIM_TOKENS, len(have)) + 1):
            kept = have[len(have) - tail :]
            if not self._codec.is_blank(kept[0]):
                return None
            head = len(have) - tail
            if full[:head] != have[:head] or len(full) <= head:
                continue
            # Skip the blank tokens that the rendering puts where ours already stand: control tokens must not come twice.
            ours, rest = list(kept), full[head:]
            while rest and ours and self._codec.is_blank(rest[0]):
                if rest[0] in ours:
                    ours = ours[ours.index(rest[0]) + 1 :]
                rest = rest[1:]
            return rest or None
        return None

    def _segment(self) -> Segment:
        return Segment(
            tokens=np.asarray(self._tokens, dtype=np.int32),
            loss_mask=np.asarray(self._mask, dtype=bool),
            rollout_log_probs=np.asarray(self._log_probs, dtype=np.float32),
            turn_ids=np.asarray(self._turn_ids, dtype=np.int32),
            rollout_routed_experts=np.concatenate(self._experts) if self._experts else None,
            weight_versions=tuple(dict.fromkeys(self._versions)),
        )

    def segments(self) -> tuple[Segment, ...]:
        """All segments that hold a sampled token, the last one cut after it (what follows conditions nothing)."""
        return (*self._done, _until_last_sample(self._segment())) if any(self._mask) else tuple(self._done)

    def raw_answers(self) -> tuple[str, ...]:
        return tuple(self._raw)


def _until_last_sample(s: Segment) -> Segment:
    last = int(np.flatnonzero(s.loss_mask)[-1]) + 1
    return replace(
        s,
        tokens=s.tokens[:last],
        loss_mask=s.loss_mask[:last],
        rollout_log_probs=s.rollout_log_probs[:last],
        turn_ids=s.turn_ids[:last],
        rollout_routed_experts=None if s.rollout_routed_experts is None else s.rollout_routed_experts[: last - 1],
    )


def _require_log_probs(answer: GenerateAnswer) -> None:
    if len(answer.output_ids) != len(answer.output_token_logprobs):
        raise DriftError(
            f"{answer.rid}: {len(answer.output_ids)} ids but {len(answer.output_token_logprobs)} log-probs"
        )


def _raw(segment: int, start: int, answer: GenerateAnswer, *, trained: bool) -> str:
    """The stored form of one sampler answer: what the drift proof recomputes from."""
    document = {"segment": segment, "start": start, "output_ids": list(answer.output_ids)}
    return json.dumps(document if trained else {**document, "trained": False})


def count_drift(trajectory: Trajectory) -> int:
    """Loss-region tokens that differ from the stored raw sampler answers: must be 0 (spec §6.1).

    Sub-calls with m = 0 are compared too, and must be outside the loss region.
    """
    expected: dict[tuple[int, int], tuple[int, bool]] = {}
    for raw in trajectory.raw_answers:
        answer = json.loads(raw)
        for offset, token in enumerate(answer["output_ids"]):
            expected[answer["segment"], answer["start"] + offset] = token, answer.get("trained", True)
    drift = 0
    for index, segment in enumerate(trajectory.segments):
        for j in np.flatnonzero(segment.loss_mask):
            drift += expected.pop((index, int(j)), None) != (int(segment.tokens[j]), True)
        for at in [at for at in expected if at[0] == index and at[1] < len(segment.tokens)]:
            if expected[at] == (int(segment.tokens[at[1]]), False):
                del expected[at]
    return drift + len(expected)


def require_no_drift(trajectories: Sequence[Trajectory]) -> None:
    """Refuse a step that would train on a token that the sampler did not return. Raises DriftError."""
    bad = [(t.id, n) for t in trajectories if (n := count_drift(t))]
    if bad:
        raise DriftError(
            f"{len(bad)} trajectories differ from the sampler's own answers in the loss region (first: {bad[0][0]}, "
            f"{bad[0][1]} tokens). The step is refused; nothing was updated. Re-run the batch."
        )
