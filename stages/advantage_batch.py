"""TB-GAE for whole padded batches: only turns are scanned, tokens are filled in (spec §3.2).

Inside a turn whose reward is at its end, A_j = U_t − v_j with U_t = r_t + γ v_next + γλ A_next. So the recursion runs
over turns, all rows at once, and costs nothing per token but one subtraction.

Shapes: B trajectories, T tokens (padded), R runs (stretches of sampled tokens of one turn without a gap).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stages.errors import RewardError

_LONG_RUN_TOKENS = 48  # from here on a slice per run is cheaper than an index per token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRuns:
    """Where sampled tokens lie, row by row, in order."""

    shape: tuple[int, int]  # (B, T)
    rows: np.ndarray  # int64 [R]
    starts: np.ndarray  # int64 [R], index into the flattened [B·T]
    stops: np.ndarray  # int64 [R], one past the last
    turn_ids: np.ndarray  # int64 [R]

    @property
    def nodes(self) -> int:
        return int((self.stops - self.starts).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchAdvantages:
    """Value targets and returns are constant inside a run, so they are kept once per run."""

    runs: TurnRuns
    advantages: np.ndarray  # float64 [B, T], 0 outside nodes
    run_targets: np.ndarray  # float64 [R], U_t = A_j + v_j for every node of the run
    run_returns: np.ndarray  # float64 [R], G_j (spec §3.5)
    rows_without_nodes: np.ndarray  # int64, trajectories that are excluded and counted

    def value_targets(self, out: np.ndarray | None = None) -> np.ndarray:
        """A_j + v_j, float64 [B, T], 0 outside nodes (there `out`, if given, keeps what it holds)."""
        return _spread(self.runs, self.run_targets, out)

    def returns(self, out: np.ndarray | None = None) -> np.ndarray:
        """G_j, float64 [B, T], 0 outside nodes (there `out`, if given, keeps what it holds)."""
        return _spread(self.runs, self.run_returns, out)


def find_runs(turn_ids: np.ndarray) -> TurnRuns:
    """Runs of a dense `turn_ids` int [B, T] that is −1 wherever a token is not a node."""
    if turn_ids.ndim != 2:
        raise ValueError(f"turn_ids must be [B, T], not {turn_ids.shape}")
    b, t = turn_ids.shape
    if not turn_ids.size:
        none = np.empty(0, dtype=np.int64)
        return TurnRuns(shape=(b, t), rows=none, starts=none, stops=none, turn_ids=none)
    changes = np.empty(t, dtype=bool)
    changes[0] = True  # a row begins a stretch
    begins = []
    for row in range(b):  # a row at a time stays in the cache
        np.not_equal(turn_ids[row, 1:], turn_ids[row, :-1], out=changes[1:])
        begins.append(np.flatnonzero(changes) + row * t)
    rows = np.repeat(np.arange(b), [len(x) for x in begins])
    starts = np.concatenate(begins)
    which = turn_ids[rows, starts - rows * t].astype(np.int64)
    keep = which >= 0
    stops = np.append(starts[1:], b * t)[keep]
    rows, starts, which = rows[keep], starts[keep], which[keep]
    if (backwards := (np.diff(which) < 0) & (np.diff(rows) == 0)).any():
        raise ValueError(f"turn ids of row {rows[1:][backwards][0]} decrease")
    return TurnRuns(shape=(b, t), rows=rows, starts=starts, stops=stops, turn_ids=which)


def _token_index(runs: TurnRuns) -> np.ndarray:
    """Flat index of every node, [nodes]."""
    lengths = runs.stops - runs.starts
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(runs.starts - before, lengths)


def _runs_are_long(runs: TurnRuns) -> bool:
    return runs.nodes >= _LONG_RUN_TOKENS * len(runs.rows)


def _dense(runs: TurnRuns, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return np.zeros(runs.shape)
    if out.shape != runs.shape or out.dtype != np.float64 or not out.flags.c_contiguous:
        raise ValueError(f"out must be a contiguous float64 array {runs.shape}, not {out.dtype} {out.shape}")
    return out


def _spread(runs: TurnRuns, per_run: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """per_run at every node, float64 [B, T]."""
    out = _dense(runs, out)
    flat = out.reshape(-1)
    if _runs_are_long(runs):
        for s, e, u in zip(runs.starts.tolist(), runs.stops.tolist(), per_run.tolist(), strict=True):
            flat[s:e] = u
    else:
        flat[_token_index(runs)] = np.repeat(per_run, runs.stops - runs.starts)
    return out


def _subtract(runs: TurnRuns, per_run: np.ndarray, values: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """per_run − values at every node, float64 [B, T]."""
    out = _dense(runs, out)
    flat, v = out.reshape(-1), values.reshape(-1)
    if _runs_are_long(runs):
        for s, e, u in zip(runs.starts.tolist(), runs.stops.tolist(), per_run.tolist(), strict=True):
            np.subtract(u, v[s:e], flat[s:e])
    else:
        at = _token_index(runs)
        flat[at] = np.repeat(per_run, runs.stops - runs.starts) - v[at]
    return out


def turn_boundary_gae_batch(
    values: np.ndarray,
    turn_ids: np.ndarray | TurnRuns,
    rewards: np.ndarray,
    gamma_turn: float = 1.0,
    lambda_turn: float = 1.0,
    *,
    turn_rewards: np.ndarray | None = None,
    next_values: np.ndarray | None = None,
    next_advantages: np.ndarray | None = None,
    next_returns: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> BatchAdvantages:
    """TB-GAE of a padded batch (spec §3.2, §3.3); equal to `turn_boundary_gae` row by row.

    `values` [B, T]; `turn_ids` int [B, T], −1 outside nodes, or runs already found. `rewards` [B], on the last node of
    each row. `turn_rewards` [B, U], further reward on the last node of turn u. `next_*` [B]: the node after the last
    one, across a turn boundary (bootstrap, or another partition); absent at a true end; `next_returns` defaults to
    `next_values`. `out`: float64 [B, T] to write the advantages to; a buffer that is kept from step to step spares the
    machine clearing fresh pages, which costs more than the arithmetic. A row without nodes is excluded and listed. Raises RewardError for a reward, or a value that the scan
    reads (the first of each run), that is not finite; elsewhere such a value makes only its own advantage so.
    """
    runs = turn_ids if isinstance(turn_ids, TurnRuns) else find_runs(turn_ids)
    b = runs.shape[0]
    if values.shape != runs.shape or rewards.shape != (b,):
        raise ValueError(f"values {values.shape} must be {runs.shape} and rewards {rewards.shape} must be ({b},)")
    values = np.ascontiguousarray(values)
    n_runs = len(runs.rows)
    per_row = np.bincount(runs.rows, minlength=b)
    empty = np.flatnonzero(per_row == 0)
    if not np.isfinite(rewards[per_row > 0]).all():
        raise RewardError("a row with sampled tokens has a reward that is not finite; mask the attempt before")
    first_v = values.reshape(-1)[runs.starts].astype(np.float64)  # the only values that the scan reads

    last_of_row = np.cumsum(per_row) - 1  # index of each row's last run
    r = np.zeros(n_runs)
    live = per_row > 0
    r[last_of_row[live]] = rewards[live]
    ends_turn = np.ones(n_runs, dtype=bool)
    ends_turn[:-1] = (runs.rows[1:] != runs.rows[:-1]) | (runs.turn_ids[1:] != runs.turn_ids[:-1])
    if turn_rewards is not None:
        r[ends_turn] += turn_rewards[runs.rows[ends_turn], runs.turn_ids[ends_turn]]
    if not np.isfinite(r).all():
        raise RewardError("a turn reward is not finite; mask the attempt before")
    gamma = np.where(ends_turn, gamma_turn, 1.0)  # a gap inside a turn is no boundary
    lam = np.where(ends_turn, lambda_turn, 1.0)

    zero = np.zeros(b)
    next_v = zero.copy() if next_values is None else np.asarray(next_values, dtype=np.float64).copy()
    next_a = zero.copy() if next_advantages is None else np.asarray(next_advantages, dtype=np.float64).copy()
    next_g = next_v.copy() if next_returns is None else np.asarray(next_returns, dtype=np.float64).copy()
    target, returns = np.empty(n_runs), np.empty(n_runs)
    order = np.argsort(-per_row, kind="stable")  # longest rows first: step k works on a prefix of them
    longest = per_row[order]
    for k in range(int(per_row.max(initial=0))):
        who = order[: int(np.searchsorted(-longest, -k, side="left"))]  # rows with more than k runs
        at = last_of_row[who] - k
        g, v = gamma[at], first_v[at]
        u = r[at] + g * next_v[who] + g * lam[at] * next_a[who]
        big_g = r[at] + g * next_g[who]
        target[at], returns[at] = u, big_g
        next_v[who], next_a[who], next_g[who] = v, u - v, big_g
    if not (np.isfinite(first_v).all() and np.isfinite(target).all()):
        raise RewardError("a value is not finite; the critic has diverged")
    adv = _subtract(runs, target, values, out)
    return BatchAdvantages(runs=runs, advantages=adv, run_targets=target, run_returns=returns, rows_without_nodes=empty)
