"""Runs one cycle: stage by stage, record by record, resumable from the database. Knows nothing of Prefect.

Every record is stored before the next one is asked for. Between records people's wishes are read: a pause or a
cancellation takes effect there and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator import lineage
from orchestrator import models as m
from orchestrator.finished import StoredPhases
from orchestrator.folders import holds, verify, weights_of
from orchestrator.holding import CancelRequested, PauseRequested, Superseded, settle
from orchestrator.inputs import Suites, load_suites, model_folder, open_backends, open_model, register_suites
from orchestrator.persist import Recorder
from orchestrator.plan import StagePlan, plan, stage_rows
from orchestrator.recipes import parse_config
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.store.logs import NewLine
from stages.alarms import alarms
from stages.backends.learner.checkpoint import digest_weights, link_or_copy, write_folder
from stages.backends.protocols import Backends
from stages.chat import Chat
from stages.config import CycleConfig
from stages.context import StageContext
from stages.errors import StopRequested
from stages.evaluate import evaluate
from stages.loop import SEED_CRITIC, ReviewPending, run_rpr, run_rsr
from stages.model_reviewer import ChatReviewer
from stages.records import CheckpointSaved, PhaseDone, PhaseStarted, Record, Selected, StepDone
from stages.review import ModelReviewer, PolicyMode, ReviewPolicy
from stages.rewrite import Planner

BEAT_S = 2.0


@dataclass(slots=True)
class Runner:
    """One process's work on one cycle. Made by `open_cycle`."""

    store: Store
    settings: Settings
    cycle: m.Cycle
    config: CycleConfig
    suites: Suites
    backends: Backends
    chat: Chat
    on_record: Callable[[m.Stage, Record], None] = lambda stage, record: None
    _beat: float = 0.0

    @property
    def home(self) -> Path:
        return self.settings.home / "cycles" / str(self.cycle.id)

    def pending(self) -> list[str]:
        """Names of the stages that are not done, in order."""
        assert self.cycle.id is not None
        done = {r.name for r in self.store.stages.of_cycle(self.cycle.id) if r.state is m.StageState.DONE}
        return [p.name for p in plan(self.config) if p.name not in done]

    def run_stage(self, name: str) -> None:
        """One stage, from its last finished record on. Raises StopRequested when a person or a gate stops it."""
        assert self.cycle.id is not None
        planned = next(p for p in plan(self.config) if p.name == name)
        row = next(r for r in self.store.stages.of_cycle(self.cycle.id) if r.name == name)
        self._stage(planned, row)

    # ------------------------------------------------------------------ one stage

    def _stage(self, planned: StagePlan, row: m.Stage) -> None:
        assert row.id is not None
        parent = self._parent(planned)
        stage_id = row.id
        critic = self._critic_parent(planned, parent)
        row = self.store.stages.start(
            row.id,
            actor_parent_id=parent.id if parent else None,
            critic_parent_id=critic.id if critic and critic.critic_digest else None,
        )
        self._log(row, logging.INFO, f"{planned.name} started, attempt {row.attempt}")
        for departure in self._departures(planned):
            self._log(row, logging.WARNING, f"{planned.name} departs from the specification: {departure}")
        try:
            with Recorder(self.store, row, human_review=self._human(planned)) as recorder:
                for record in self._records(planned, row, parent):
                    recorder.record(self._published(row, record))
                    if isinstance(record, CheckpointSaved) and record.name.endswith(SEED_CRITIC):
                        self._enter_seed_critic(row, record.name)
                    self._tell(row, record)
            self._still_ours(row)
        except Superseded:
            raise
        except ReviewPending:
            self.store.stages.set_state(stage_id, m.StageState.SUSPENDED)
            raise
        except CancelRequested:
            self.store.stages.set_state(stage_id, m.StageState.CANCELLED)
            self._clear(row)
            raise
        except (StopRequested, KeyboardInterrupt):
            self.store.stages.set_state(stage_id, m.StageState.PAUSED)
            raise
        except Exception as error:
            self.store.stages.set_state(stage_id, m.StageState.FAILED, error=str(error))
            raise
        self.store.stages.set_state(stage_id, m.StageState.DONE)
        self._clear(row)
        self._log(row, logging.INFO, f"{planned.name} done")

    def sweep(self) -> None:
        """Remove the work folders of stages that have ended; their process may have died before it could."""
        assert self.cycle.id is not None
        for row in self.store.stages.of_cycle(self.cycle.id):
            if row.state in (m.StageState.DONE, m.StageState.CANCELLED):
                self._clear(row)

    def _clear(self, row: m.Stage) -> None:
        """Remove a stage's work folder. Candidates that lay in it keep their digests and lose their path."""
        assert row.id is not None
        folder = self.home / "work" / row.name
        self.store.checkpoints.forget_folder(row.id, folder)
        shutil.rmtree(folder, ignore_errors=True)

    def _records(self, planned: StagePlan, row: m.Stage, parent: m.Checkpoint | None) -> Iterator[Record]:
        """The stage's records; a wish to stop is obeyed after each."""
        stream = self._work_and_measure(planned, row, parent)
        try:
            for record in stream:
                yield record
                self._obey(row, record)
        finally:
            stream.close()

    def _work_and_measure(
        self, planned: StagePlan, row: m.Stage, parent: m.Checkpoint | None
    ) -> Generator[Record, None, None]:
        ctx = self._context(planned)
        name = planned.name
        if planned.parent is None:
            base = model_folder(self.config)
            if self._checkpoint(name) is None:
                yield CheckpointSaved(
                    name=name, path=base, actor_digest=digest_weights(base), critic_digest=None, retained=True
                )
        elif self._checkpoint(name) is None:
            yield from self._train(ctx, planned, row, parent)
        saved = self._checkpoint(name)
        assert saved is not None
        measured = {e.suite_digest for e in self.store.evaluations.list(stage_id=row.id).items}
        for suite in self.suites.reported:
            if suite.digest not in measured:
                yield from evaluate(ctx, self.config.evaluate, suite, name, weights_of(saved).actor)

    def _train(
        self, ctx: StageContext, planned: StagePlan, row: m.Stage, parent: m.Checkpoint | None
    ) -> Generator[Record, None, None]:
        if parent is None:
            assert self.cycle.id is not None
            parent = lineage.inherited(self.store, self.cycle.id, planned.parent or "")  # says what is missing
        weights = weights_of(parent)
        verify(parent, weights)
        critic = self._critic_parent(planned, parent)
        if critic is not parent:  # an experiment's arm that does not inherit
            weights = replace(weights, critic=weights_of(critic).critic if critic else None)
            if critic:
                verify(critic, weights_of(critic))
        finished = StoredPhases(self.store, row, self._policy(planned))
        if planned.kind is m.StageKind.RSR:
            yield from run_rsr(
                ctx,
                self.config.rsr_of(planned.round),
                self.config.validate_,
                name=planned.name,
                parent=weights,
                parent_name=parent.name,
                pool=self.suites.pool.tasks,
                validation=self.suites.validation,
                planner=self._planner(planned),
                reviewer=self._reviewer(planned),
                finished=finished,
            )
        else:
            yield from run_rpr(
                ctx,
                self.config.rpr_of(planned.round),
                self.config.validate_,
                name=planned.name,
                parent=weights,
                parent_name=parent.name,
                pool=self.suites.pool.tasks,
                validation=self.suites.validation,
                finished=finished,
            )

    # ------------------------------------------------------------------ parts

    def _context(self, planned: StagePlan) -> StageContext:
        rsr, rpr = self.config.rsr_of(max(1, planned.round)), self.config.rpr_of(max(1, planned.round))
        return StageContext(
            backends=self.backends,
            chat=self.chat,
            rollout=self.config.rollout,
            seed=(self.config.seed, planned.name, "main"),
            namespace=f"cycle-{self.cycle.id}",
            max_new_tokens=rpr.max_new_tokens
            if planned.kind is m.StageKind.RPR
            else rsr.explore.sampling.max_new_tokens,
            work_dir=self._work(planned),
        )

    def _work(self, planned: StagePlan) -> Path:
        return self.home / "work" / planned.name

    def _parent(self, planned: StagePlan) -> m.Checkpoint | None:
        assert self.cycle.id is not None
        return lineage.in_line(self.store, self.cycle.id, planned.parent) if planned.parent else None

    def _critic_parent(self, planned: StagePlan, parent: m.Checkpoint | None) -> m.Checkpoint | None:
        """The checkpoint whose critic enters: the parent, or what `critic_reset` puts in its place (None: a cold one)."""
        reset = self.config.rpr_of(planned.round).critic_reset if planned.kind is m.StageKind.RPR else None
        if reset is None or parent is None:
            return parent
        assert self.cycle.id is not None
        return lineage.inherited(self.store, self.cycle.id, f"RPR-1 {SEED_CRITIC}") if reset == "seed" else None

    def _departures(self, planned: StagePlan) -> tuple[str, ...]:
        return self.config.rpr_of(planned.round).departures() if planned.kind is m.StageKind.RPR else ()

    def _checkpoint(self, name: str) -> m.Checkpoint | None:
        return self.store.checkpoints.named(self.cycle.id, name)

    def _human(self, planned: StagePlan) -> bool:
        return planned.kind is m.StageKind.RSR and self.config.rsr_of(planned.round).review.policy == "human"

    def _policy(self, planned: StagePlan) -> ReviewPolicy:
        review = self.config.rsr_of(planned.round).review
        return ReviewPolicy(mode=PolicyMode(review.policy), required_reviewers=review.required_reviewers)

    def _planner(self, planned: StagePlan) -> Planner | None:
        """None: the actor plans."""
        name = self.config.rsr_of(planned.round).rewrite.planner
        if name == "actor":
            return None
        sampler, chat = open_model(Path(name))
        return Planner(name=Path(name).name, sampler=sampler, chat=chat)

    def _reviewer(self, planned: StagePlan) -> ModelReviewer | None:
        folder = self.config.rsr_of(planned.round).review.model
        if folder is None:
            return None
        sampler, chat = open_model(folder)
        return ChatReviewer(name=folder.name, sampler=sampler, chat=chat)

    def _published(self, row: m.Stage, record: Record) -> Record:
        """A checkpoint that will be loaded again moves out of the stage's work folder, byte for byte."""
        if not isinstance(record, CheckpointSaved):
            return record
        if record.name != row.name and not record.name.endswith(SEED_CRITIC):
            return replace(record, name=f"{row.name} {record.name}")
        if row.kind is m.StageKind.BASE:
            return record
        place = self.home / "checkpoints" / record.name.replace(" ", "-")
        if not holds(place, record):  # an earlier attempt may have left other bytes there

            def fill(folder: Path) -> None:
                for part in ("actor", "critic"):
                    if (record.path / part).is_dir():
                        link_or_copy(record.path / part, folder / part)
                if not (record.path / "actor").is_dir():  # the parent was kept, and it is the base model's own folder
                    link_or_copy(record.path, folder / "actor")

            write_folder(place, fill)
        return replace(record, path=place)

    def _enter_seed_critic(self, row: m.Stage, name: str) -> None:
        """From here on the stage's checkpoints descend from φ_seed."""
        seed = self._checkpoint(name)
        assert seed is not None
        assert seed.id is not None
        assert row.id is not None
        row.critic_parent_id = seed.id
        self.store.stages.set_critic_parent(row.id, seed.id)

    def _obey(self, row: m.Stage, record: Record) -> None:
        """Read people's wishes and show that we live, at most every two seconds.

        After an optimiser step or a checkpoint, always: a process that lost its stage must not train on.
        """
        assert self.cycle.id is not None
        if time.monotonic() - self._beat < BEAT_S and not isinstance(record, StepDone | CheckpointSaved):
            return
        self._beat = time.monotonic()
        self._still_ours(row)
        self.store.cycles.beat(self.cycle.id)
        wanted = self.store.cycles.desired(self.cycle.id)
        if wanted is m.DesiredState.PAUSE:
            raise PauseRequested("paused on request")
        if wanted is m.DesiredState.CANCEL:
            raise CancelRequested("cancelled on request")

    def _still_ours(self, row: m.Stage) -> None:
        """Raises Superseded when another process has started the stage after us."""
        assert row.id is not None
        if (now := self.store.stages.get(row.id).attempt) != row.attempt:
            raise Superseded(
                f"{row.name}: attempt {now} has taken over from attempt {row.attempt}, whose process stops here"
            )

    def _tell(self, row: m.Stage, record: Record) -> None:
        self.on_record(row, record)
        match record:
            case PhaseStarted():
                self._log(
                    row,
                    logging.INFO,
                    f"{row.name} {record.phase}: started" + (f", {record.total} to do" if record.total else ""),
                )
            case PhaseDone():
                facts = ", ".join(f"{k} {v}" for k, v in record.facts.items() if v is not None)
                self._log(row, logging.INFO, f"{row.name} {record.phase}: done ({facts})")
            case Selected():
                self._log(row, logging.INFO, f"{row.name} kept {record.chosen} of {len(record.candidates)} candidates")
            case StepDone():
                for alarm in map(str, alarms(record.metrics)):
                    self._log(row, logging.WARNING, f"{row.name} {record.phase} step {record.step}: {alarm}")
                    self.store.events.append(
                        m.EventKind.ALARM,
                        cycle_id=row.cycle_id,
                        stage_id=row.id,
                        payload={"stage": row.name, "phase": record.phase, "step": record.step, "text": alarm},
                    )

    def _log(self, row: m.Stage, level: int, text: str) -> None:
        assert self.cycle.id is not None
        self.store.logs.append(self.cycle.id, [NewLine(level=level, logger="rsi.cycle", text=text, stage_id=row.id)])


def run_cycle(
    store: Store,
    settings: Settings,
    cycle_id: int,
    *,
    on_record: Callable[[m.Stage, Record], None] = lambda stage, record: None,
) -> m.CycleState:
    """Work on a cycle in this process until it is done, paused, suspended at a gate or cancelled; returns that state.

    Raises what stopped it when that was an error; the cycle is then `failed` and can be resumed.
    """
    with (
        settle(store, cycle_id, settings) as outcome,
        open_cycle(store, settings, cycle_id, on_record=on_record) as runner,
    ):
        for stage in runner.pending():
            runner.run_stage(stage)
    return outcome.state


@contextlib.contextmanager
def open_cycle(
    store: Store,
    settings: Settings,
    cycle_id: int,
    *,
    on_record: Callable[[m.Stage, Record], None] = lambda stage, record: None,
) -> Iterator[Runner]:
    """Everything that a cycle's stages need, open for as long as they run."""
    cycle = store.cycles.get(cycle_id)
    config = parse_config(cycle.config, f"cycle {cycle_id}")
    model = model_folder(config)
    suites = load_suites(config, settings)
    register_suites(store, suites)
    store.stages.plan(cycle_id, stage_rows(config))
    with open_backends(config, model) as backends:
        runner = Runner(
            store=store,
            settings=settings,
            cycle=cycle,
            config=config,
            suites=suites,
            backends=backends,
            chat=Chat(model),
            on_record=on_record,
        )
        runner.sweep()
        yield runner
