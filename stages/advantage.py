"""Advantages: token GAE and turn-boundary GAE over the sampled tokens of one trajectory (spec §3).

A *node* is a token that takes part in the recursion. For turn-boundary GAE these are exactly the tokens with m = 1.
Everything is numpy float64. Shapes: N nodes of one segment, T tokens of one segment. The vectorised form for whole
batches is `stages.advantage_batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from stages.domain import Segment
from stages.errors import RewardError


class Estimator(StrEnum):
    """Which recursion gives the advantages (spec §3.1, §3.2)."""

    TB_GAE = "tb_gae"  # nodes: sampled tokens; clocks tick at turn boundaries only
    TOKEN_ALL = "token_all"  # nodes: every token from the first to the last sampled one; a tick per token
    TOKEN_POLICY = "token_policy"  # nodes: sampled tokens; a tick per sampled token


class Handover(StrEnum):
    """What crosses a summarisation boundary (spec §3.4)."""

    FULL = "full"  # v and A of the next segment's first node
    VALUE_ONLY = "value_only"  # v alone; the error W·A is reported
    NONE = "none"  # each segment is a terminal episode with the trajectory's reward


class TimeLimit(StrEnum):
    """How a truncated attempt with a verdict ends (spec §3.2)."""

    TERMINAL = "terminal"  # a verified final state is terminal: v_{T+1} = 0
    BOOTSTRAP = "bootstrap"  # v_{T+1} = V of the final prefix
    MASK = "mask"  # left out, and counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What the node after a cut hands back across it (spec §3.3)."""

    value: float  # v_{b+1}
    advantage: float = 0.0  # A_{b+1}; 0 = bootstrap with the value alone
    mc_return: float | None = None  # G_{b+1}; None = bootstrap with the value
    turn_id: int | None = None  # turn of node b+1; None = the cut is a turn boundary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """One partition's result."""

    advantages: np.ndarray  # float64 [N], A_j
    value_targets: np.ndarray  # float64 [N], A_j + v_j: for the value loss only
    returns: np.ndarray  # float64 [N], G_j, free of λ: for explained variance only (spec §3.5)
    carry: Carry | None  # for the partition before this one; None when nothing was here and nothing followed


def _arrays(values: np.ndarray, rewards: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """float64 views of both, checked. Raises RewardError for NaN or infinity, ValueError for shapes."""
    v = np.asarray(values, dtype=np.float64)
    r = np.asarray(rewards, dtype=np.float64)
    if v.ndim != 1 or v.shape != r.shape:
        raise ValueError(f"{where}: values {v.shape} and rewards {r.shape} must both be [N]")
    if not np.isfinite(r).all():
        raise RewardError(
            f"{where}: reward of node {int(np.flatnonzero(~np.isfinite(r))[0])} is not finite; mask the attempt"
        )
    if not np.isfinite(v).all():
        node = int(np.flatnonzero(~np.isfinite(v))[0])
        raise RewardError(f"{where}: the critic's value of node {node} is not finite; the critic has diverged")
    return v, r


def _turns(turn_ids: np.ndarray, n: int, where: str) -> np.ndarray:
    t = np.asarray(turn_ids)
    if t.shape != (n,):
        raise ValueError(f"{where}: turn_ids {t.shape} must be [{n}]")
    if n and (t[0] < 0 or (np.diff(t) < 0).any()):
        raise ValueError(f"{where}: turn ids of nodes must be >= 0 and never decrease")
    return t


def turn_boundary_gae(
    values: np.ndarray,
    rewards: np.ndarray,
    turn_ids: np.ndarray,
    gamma_turn: float = 1.0,
    lambda_turn: float = 1.0,
    carry: Carry | None = None,
) -> Advantages:
    """TB-GAE of one partition (spec §3.2, §3.3).

    `values`, `rewards`, `turn_ids`: [N], one entry per node. `carry`: the node that follows, None at a true end.
    Only turns are scanned: inside a turn A_j = U_t − v_j, plus the turn's own rewards from j on.
    Raises RewardError for a value or reward that is not finite.
    """
    v, r = _arrays(values, rewards, "turn_boundary_gae")
    n = len(v)
    t = _turns(turn_ids, n, "turn_boundary_gae")
    if n == 0:
        return Advantages(advantages=v.copy(), value_targets=v.copy(), returns=v.copy(), carry=carry)
    last = np.append(t[1:] != t[:-1], True)  # is the last node of its turn
    stops = np.flatnonzero(last) + 1
    starts = np.concatenate(([0], stops[:-1]))
    inner = bool(r[~last].any())  # a reward before the end of its turn: rare, so summed only then
    adv, target, ret = np.empty(n), np.empty(n), np.empty(n)
    next_v = next_a = next_g = 0.0
    g = lam = 1.0
    if carry is not None:
        next_v, next_a = carry.value, carry.advantage
        next_g = carry.value if carry.mc_return is None else carry.mc_return
        g, lam = (1.0, 1.0) if carry.turn_id == t[-1] else (gamma_turn, lambda_turn)
    for s, e in zip(reversed(starts.tolist()), reversed(stops.tolist()), strict=True):
        own = np.cumsum(r[s:e][::-1])[::-1] if inner else r[e - 1]
        target[s:e] = own + (g * next_v + g * lam * next_a)
        ret[s:e] = own + g * next_g
        adv[s:e] = target[s:e] - v[s:e]
        next_v, next_a, next_g = float(v[s]), float(adv[s]), float(ret[s])
        g, lam = gamma_turn, lambda_turn
    first = Carry(value=next_v, advantage=next_a, mc_return=next_g, turn_id=int(t[0]))
    return Advantages(advantages=adv, value_targets=target, returns=ret, carry=first)


def _reverse_scan(x: np.ndarray, factor: float, after: float) -> np.ndarray:
    """y_j = x_j + factor · y_{j+1}, y_N = after, at C speed."""
    from scipy.signal import lfilter  # slow to import; only the token baselines need it

    y, _ = lfilter([1.0], [1.0, -factor], x[::-1], zi=np.array([factor * after]))
    return y[::-1].copy()


def token_gae(
    values: np.ndarray, rewards: np.ndarray, gamma: float = 1.0, lam: float = 1.0, carry: Carry | None = None
) -> Advantages:
    """Token GAE over the given nodes, one tick per node (spec §3.1). `values`, `rewards`: [N].

    Both baselines of the field are this recursion over different nodes: `node_positions` chooses them.
    """
    v, r = _arrays(values, rewards, "token_gae")
    if len(v) == 0:
        return Advantages(advantages=v.copy(), value_targets=v.copy(), returns=v.copy(), carry=carry)
    next_v, next_a, next_g = 0.0, 0.0, 0.0
    if carry is not None:
        next_v, next_a = carry.value, carry.advantage
        next_g = carry.value if carry.mc_return is None else carry.mc_return
    delta = r + gamma * np.append(v[1:], next_v) - v
    adv = _reverse_scan(delta, gamma * lam, next_a)
    ret = _reverse_scan(r, gamma, next_g)
    first = Carry(value=float(v[0]), advantage=float(adv[0]), mc_return=float(ret[0]))
    return Advantages(advantages=adv, value_targets=adv + v, returns=ret, carry=first)


def monte_carlo_returns(
    rewards: np.ndarray, turn_ids: np.ndarray, gamma_turn: float = 1.0, carry: Carry | None = None
) -> np.ndarray:
    """G_j = r_j + Γ_j G_{j+1} under turn-boundary clocks, [N] (spec §3.5)."""
    return turn_boundary_gae(np.zeros(len(rewards)), rewards, turn_ids, gamma_turn, 1.0, carry).returns


def continuation_weights(
    turn_ids: np.ndarray, gamma_turn: float, lambda_turn: float, next_turn_id: int | None = None
) -> np.ndarray:
    """W_{j,b+1} = Π_{k=j..b} Γ_k Λ_k of every node j before a cut, [N] (spec §3.3)."""
    t = _turns(turn_ids, len(turn_ids), "continuation_weights")
    if len(t) == 0:
        return np.empty(0)
    crossings = np.append(t[1:] != t[:-1], next_turn_id != t[-1])
    return (gamma_turn * lambda_turn) ** np.cumsum(crossings[::-1])[::-1].astype(np.float64)


def estimators_coincide(a: tuple[Estimator, float, float], b: tuple[Estimator, float, float]) -> bool:
    """True when two (estimator, γ, λ) are the same function of the data, so that an experiment must refuse both.

    At γ = λ = 1 every estimator telescopes to A_j = Σ r − v_j (spec §3.2).
    """
    return a == b or (a[1:] == (1.0, 1.0) and b[1:] == (1.0, 1.0))


# ------------------------------------------------------------------------------------------ trajectories of segments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentNodes:
    """The nodes of one segment. A sub-call that is not trained on has none (spec §3.4)."""

    values: np.ndarray  # [N], frozen pre-update values
    turn_ids: np.ndarray  # int [N]
    end_value: float | None = None  # V of the whole segment as prefix: for `bootstrap` and the summary's value gap
    positions: np.ndarray | None = None  # int [N], where the nodes lie among the segment's T tokens
    tokens: int = 0  # T

    def to_tokens(self, nodes: np.ndarray) -> np.ndarray:
        """Spreads [N] to float32 [T], 0 elsewhere, as `TrainSequence` wants it."""
        if self.positions is None:
            raise ValueError("these nodes do not know their positions; make them with segment_nodes")
        out = np.zeros(self.tokens, dtype=np.float32)
        out[self.positions] = nodes
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverReport:
    """One summarisation boundary (spec §3.4)."""

    segment: int  # the segment before the boundary
    next_value: float  # v_next, under the next segment's own prompt
    old_value: float | None  # V(old prefix); None when it was not given
    value_gap: float | None  # v_next − V(old prefix)
    dropped_last: float  # W·A at the last node before the boundary if only the value were carried: γλ·A_next
    dropped_rms: float  # root mean square of W·A over the segment's nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryAdvantages:
    """Advantages of one attempt, one entry per segment, in order; empty arrays where a segment has no node."""

    segments: tuple[Advantages, ...]
    handovers: tuple[HandoverReport, ...]
    excluded: str | None = None  # why it is no sample: "no_verdict", "no_nodes" or "time_limit"; arrays are then zero


def node_positions(loss_mask: np.ndarray, estimator: Estimator = Estimator.TB_GAE) -> np.ndarray:
    """Indices of the nodes among T tokens. `token_all` also takes the observations between sampled tokens (spec §3.1)."""
    sampled = np.flatnonzero(loss_mask)
    if estimator is Estimator.TOKEN_ALL and len(sampled):
        return np.arange(sampled[0], sampled[-1] + 1)
    return sampled


def segment_nodes(
    segment: Segment, values: np.ndarray, *, end_value: float | None = None, estimator: Estimator = Estimator.TB_GAE
) -> SegmentNodes:
    """The nodes of a `Segment` whose critic values are `values` [T].

    For `token_all` the values of observation tokens are needed too, so ask the critic for them.
    """
    if len(values) != len(segment.tokens):
        raise ValueError(f"segment has {len(segment.tokens)} tokens and {len(values)} values")
    at = node_positions(segment.loss_mask, estimator)
    turns = segment.turn_ids[at]
    if estimator is Estimator.TOKEN_ALL:
        turns = np.maximum.accumulate(turns)  # an observation belongs to the turn before it
    picked = np.asarray(values, dtype=np.float64)[at]
    return SegmentNodes(values=picked, turn_ids=turns, end_value=end_value, positions=at, tokens=len(segment.tokens))


def _segment_rewards(seg: SegmentNodes, turn_rewards: Mapping[int, float], terminal: float) -> np.ndarray:
    r = np.zeros(len(seg.values))
    if len(r):
        if turn_rewards:
            ends = np.flatnonzero(np.append(seg.turn_ids[1:] != seg.turn_ids[:-1], True))
            r[ends] = [turn_rewards.get(int(t), 0.0) for t in seg.turn_ids[ends]]
        r[-1] += terminal
    return r


def trajectory_advantages(
    segments: Sequence[SegmentNodes],
    *,
    reward: float | None,
    turn_rewards: Mapping[int, float] | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    estimator: Estimator = Estimator.TB_GAE,
    handover: Handover = Handover.FULL,
    truncated: bool = False,
    time_limit: TimeLimit = TimeLimit.TERMINAL,
) -> TrajectoryAdvantages:
    """Advantages, value targets and Monte-Carlo returns of one attempt over its segments (spec §3.2, §3.4).

    `reward`: the attempt's reward, on the last node; None: no verdict, so it is no sample. `turn_rewards`: turn index →
    further reward on the last node of that turn. `gamma`, `lam`: per turn for `tb_gae`, per token otherwise.
    `truncated`: the attempt was ended by a limit; `time_limit` says what follows. With `handover: none` the reward is
    placed on the last node of every segment. Raises RewardError for values or rewards that are not finite, and
    ValueError when `bootstrap` lacks the last segment's `end_value`.
    """
    live = [i for i, s in enumerate(segments) if len(s.values)]
    masked = truncated and time_limit is TimeLimit.MASK
    excluded = "no_verdict" if reward is None else "no_nodes" if not live else "time_limit" if masked else None
    if reward is None or excluded is not None:
        zero = tuple(
            Advantages(advantages=z, value_targets=z, returns=z, carry=None)
            for z in (np.zeros(len(s.values)) for s in segments)
        )
        return TrajectoryAdvantages(segments=zero, handovers=(), excluded=excluded)
    final: Carry | None = None
    if truncated and time_limit is TimeLimit.BOOTSTRAP:
        end = segments[live[-1]].end_value
        if end is None:
            raise ValueError("time_limit: bootstrap needs end_value, the critic's value of the final prefix")
        final = Carry(value=end)

    def one(i: int, terminal: float, carry: Carry | None) -> Advantages:
        seg = segments[i]
        r = _segment_rewards(seg, turn_rewards or {}, terminal)
        if estimator is Estimator.TB_GAE:
            return turn_boundary_gae(seg.values, r, seg.turn_ids, gamma, lam, carry)
        return token_gae(seg.values, r, gamma, lam, carry)

    def crossing(seg: SegmentNodes) -> np.ndarray:
        n = len(seg.values)
        if estimator is Estimator.TB_GAE:
            return continuation_weights(seg.turn_ids, gamma, lam)
        return (gamma * lam) ** np.arange(n, 0, -1, dtype=np.float64)

    done: dict[int, Advantages] = {}
    reports: list[HandoverReport] = []
    carry, true_next = final, final  # what the chosen hand-over passes; what a full one would
    for i in reversed(live):
        is_last = i == live[-1]
        terminal = float(reward) if is_last or handover is Handover.NONE else 0.0
        done[i] = one(i, terminal, carry)
        whole = done[i] if handover is Handover.FULL or is_last else one(i, 0.0, true_next)
        if not is_last:
            assert true_next is not None
            dropped = crossing(segments[i]) * true_next.advantage
            old = segments[i].end_value
            reports.append(
                HandoverReport(
                    segment=i,
                    next_value=true_next.value,
                    old_value=old,
                    value_gap=None if old is None else true_next.value - old,
                    dropped_last=float(dropped[-1]),
                    dropped_rms=float(np.sqrt(np.mean(dropped**2))),
                )
            )
        assert whole.carry is not None
        full = whole.carry
        # a segment boundary is always a turn boundary, so no turn id crosses it
        true_next = Carry(value=full.value, advantage=full.advantage, mc_return=full.mc_return)
        if handover is Handover.FULL:
            carry = true_next
        elif handover is Handover.VALUE_ONLY:
            # G stays the realised return: with v in its place the critic would explain itself
            carry = Carry(value=full.value, mc_return=full.mc_return)
        else:
            carry = None
    empty = np.empty(0)
    nothing = Advantages(advantages=empty, value_targets=empty, returns=empty, carry=None)
    return TrajectoryAdvantages(
        segments=tuple(done.get(i, nothing) for i in range(len(segments))), handovers=tuple(reversed(reports))
    )


def whiten(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Option, off by default (spec §5): zero mean and unit deviation over the masked tokens of the whole batch."""
    flat = np.concatenate([np.empty(0), *advantages])
    if flat.size < 2 or flat.min() == flat.max():
        return [np.zeros_like(a, dtype=np.float64) for a in advantages]
    mean, std = flat.mean(), flat.std()
    return [(a - mean) / std for a in advantages]
