"""TITO ledger: token in, token out (spec §6.1).

Training consumes the sampler's ids and log-probabilities, never re-rendered text. At each turn boundary the harness
renders the whole conversation anew, and the next prompt must extend what was sampled. Four outcomes, tried in order:

* strict prefix: the rendering tokenises to an extension of what we have;
* trimmed normalisation: it does but for a few blank or control tokens at the boundary, which stay as sampled;
* re-tokenised boundary: it does as text; only what follows is tokenised;
* new chunk: a new segment starts with the rendering as its prompt.

A repair is counted once: what stood in the last rendering is held as it is, and only what came after it is compared again.

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
        self._open(prompt_text)

    def _open(self, rendered: str, prompt: Sequence[int] | None = None) -> None:
        prompt = self._codec.encode(rendered) if prompt is None else prompt
        self._rendered = rendered  # what the tokens before `_sampled_from` stand for
        self._sampled_from = len(prompt)
        self._repaired = False  # since then the tokens of the segment are no longer the rendering's own
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
        full = self._codec.encode(rendered)
        if len(full) > len(self._tokens) and full[: len(self._tokens)] == self._tokens:
            outcome, rest = Boundary.STRICT_PREFIX, full[len(self._tokens) :]
        else:
            outcome, rest = self._after_last_rendering(rendered) or (Boundary.NEW_CHUNK, full)
        if outcome is Boundary.NEW_CHUNK:
            self.close_segment()
            self._open(rendered, full)
        else:
            self._append_context(rest)
            self._repaired = self._repaired or outcome is not Boundary.STRICT_PREFIX
            self._rendered, self._sampled_from = rendered, len(self._tokens)
        self.boundaries[outcome] = self.boundaries.get(outcome, 0) + 1
        return outcome

    def start_segment(self, rendered: str) -> None:
        """A new prompt that need not extend anything: the first of an attempt, or what a summary left."""
        self.close_segment()
        self._open(rendered)

    def close_segment(self) -> None:
        """The open segment is whole; what comes next are sub-calls, or `start_segment`.

        What followed its last sampled token stays, as the state that was summarised; routes exist for sampled prefixes only.
        """
        if any(self._mask):
            whole = self._segment()
            self._done.append(whole if whole.rollout_routed_experts is None else _until_last_sample(whole))
        self._open("", [])

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

    def _after_last_rendering(self, rendered: str) -> tuple[Boundary, list[int]] | None:
        """The outcome when the new rendering extends the last one, and the tokens to append; None: a new chunk."""
        if not rendered.startswith(self._rendered):
            return None
        text = rendered[len(self._rendered) :]
        full, ours = self._codec.encode(text), self._tokens[self._sampled_from :]
        tails = [0]  # how many tokens at the end of what was sampled may differ
        while len(tails) <= min(MAX_TRIM_TOKENS, len(ours)) and self._codec.is_blank(ours[-len(tails)]):
            tails.append(len(tails))
        for tail in tails:
            head, kept = ours[: len(ours) - tail], ours[len(ours) - tail :]
            if len(full) > len(head) and full[: len(head)] == head:
                rest = full[len(head) :]
                same = Boundary.STRICT_PREFIX if self._repaired else Boundary.RETOKENISED
                if rest := rest[self._standing(kept, rest) :]:
                    return Boundary.TRIMMED if tail else same, rest
        before = self._codec.decode(self._tokens[: self._sampled_from])
        for tail in tails:
            said = self._codec.decode(self._tokens[: len(self._tokens) - tail]).removeprefix(before)
            if len(text) > len(said) and text.startswith(said):
                rest = self._codec.encode(text[len(said) :])
                if rest := rest[self._standing(ours[len(ours) - tail :], rest) :]:
                    return Boundary.RETOKENISED, rest
        return None

    def _standing(self, kept: Sequence[int], rest: Sequence[int]) -> int:
        """How many tokens of the rendering stand at the end of what we have already: control tokens must not come twice.

        White space that differs is passed over on the way to them; a control token that we do not have is not.
        """
        ours, found = list(kept), 0
        for n, token in enumerate(rest):
            if token in ours:
                ours, found = ours[ours.index(token) + 1 :], n + 1
            elif not ours or self._codec.decode([token]).strip():
                break
        return found

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
    document = {
        "segment": segment,
        "start": start,
        "output_ids": list(answer.output_ids),
        "weight_version": answer.weight_version,
    }
    return json.dumps(document if trained else {**document, "trained": False})


def count_drift(trajectory: Trajectory) -> int:
    """Loss-region tokens that differ from the stored raw sampler answers: must be 0 (spec §6.1).

    Sub-calls with m = 0 are compared too, and must be outside the loss region.
    """
    answers = [json.loads(raw) for raw in trajectory.raw_answers]
    drift = sum(len(a["output_ids"]) for a in answers if a["segment"] >= len(trajectory.segments))
    for index, segment in enumerate(trajectory.segments):
        said = np.full(len(segment.tokens), -1, dtype=np.int64)
        trained = np.zeros(len(segment.tokens), dtype=bool)
        for answer in (a for a in answers if a["segment"] == index):
            start, ids = answer["start"], answer["output_ids"]
            inside = ids[: max(0, len(said) - start)]
            drift += len(ids) - len(inside)
            said[start : start + len(inside)] = inside
            trained[start : start + len(inside)] = answer.get("trained", True)
        other = said != segment.tokens
        drift += int((segment.loss_mask & (other | ~trained)).sum())
        drift += int((~segment.loss_mask & (said >= 0) & (other | trained)).sum())
    return drift


def require_no_drift(trajectories: Sequence[Trajectory]) -> None:
    """Refuse a step that would train on a token that the sampler did not return. Raises DriftError."""
    bad = [(t.id, n) for t in trajectories if (n := count_drift(t))]
    if bad:
        raise DriftError(
            f"{len(bad)} trajectories differ from the sampler's own answers in the loss region (first: {bad[0][0]}, "
            f"{bad[0][1]} tokens). The step is refused; nothing was updated. Re-run the batch."
        )
