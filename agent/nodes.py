"""The steps of the loop: each reads the store, asks a pure function, acts through the hands, and writes what came.

A node holds no truth of its own: everything it needs is read from the store when it runs, so it may be run again
at any time. State passes ids only; the key `next` names the node to go to.
"""

from __future__ import annotations

from typing import TypedDict

from agent import built_in, chooser, refiner
from agent.catalogue.model import traits
from agent.config import SessionConfig
from agent.counsel import Counsel
from agent.decisions import Ids, consequences
from agent.ending import bring_back, proven, restore
from agent.evidence import (
    BASELINE,
    CLOSE_OUT,
    comparison_of,
    kept_anything,
    known,
    situation,
    spent,
    too_noisy,
)
from agent.hands import Hands
from agent.heeding import heed, restores_first, stop
from agent.identity import identity
from agent.judge import Assessment, Comparison, Need, asks_answers, assess
from agent.known import blamed
from agent.levers import Setting
from agent.planners.base import Planner, View
from agent.policy import SERVES, broken_constraints, forbidden, over, restarts
from agent.spare_time import set_aside
from agent.spoken import listen
from agent.todo_list import never_approved, on_the_list
from agent.validity import QUIET, hopelessly_void, noisy, void_streak
from agent.verdicts import final_verdict, no_time_left, scope
from state import events as ev
from state.errors import ForeignTraffic, PolicyRefused
from state.models import (
    Arm,
    Change,
    DecisionKind,
    Disruption,
    Experiment,
    LaunchSpec,
    Purpose,
    Role,
    SessionStatus,
    TodoStatus,
    Trial,
    TrialStatus,
    Who,
)
from state.store import ComparisonRow, Store
from state.tables import IDENTITY
from tools.diagnose import Action
from tools.next_step import FINAL
from tools.target import Target

QUIET_CHECK_S = 2.0


class LoopState(TypedDict, total=False):
    """What LangGraph carries: the session's id and the name of the next node."""

    session_id: str
    next: str


class Nodes:
    """The steps, bound to one session."""

    def __init__(self, hands: Hands, planner: Planner, counsel: Counsel) -> None:
        self.hands = hands
        self.planner = planner
        self.counsel = counsel
        self.assessed: tuple[Comparison, Assessment] | None = None

    @property
    def store(self) -> Store:
        """The session's store."""
        return self.hands.store

    @property
    def target(self) -> Target:
        """The session's target."""
        return self.hands.target

    @property
    def config(self) -> SessionConfig:
        """The session's configuration."""
        return self.hands.config

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.hands.session_id

    # --- observe, plan, choose -----------------------------------------------------------------------------

    async def observe(self, state: LoopState) -> LoopState:
        """Look at the host before anything else; go on with what is under way, else make sure known-good serves."""
        self._enter("observe")
        await self.hands.guard()
        position = await self.hands.where()
        ahead = await self.hands.hours.ahead()
        if self.store.open_comparison(self.session_id) is not None and not ahead:
            return {"next": "apply"}
        known_good = self.hands.role(Role.KNOWN_GOOD)
        trial = position.trial
        if trial is None:
            return self._heal("nothing serves on the port")
        if trial.status is not TrialStatus.READY or trial.fingerprint != known_good:
            return {"next": "heal"}
        trouble = await self.target.trouble()
        if trouble is not None:
            return self._heal(f"{trial.id} does not generate: {trouble}")
        await self.hands.manners.at_rest()
        if self.store.todo(self.session_id, BASELINE) is None:
            return {"next": "plan"}
        if ahead and self.store.open_comparison(self.session_id) is not None:
            await self.hands.hours.wait()
            return {"next": "observe"}
        return {"next": "choose"}

    async def heal(self, state: LoopState) -> LoopState:
        """Bring known-good up: after a revert, a crash, or whatever else left another state behind."""
        self._enter("heal")
        await restore(self.hands, self.hands.role(Role.KNOWN_GOOD))
        return {"next": "observe"}

    async def plan(self, state: LoopState) -> LoopState:
        """Ask the planner and put its proposal on the list, behind the baseline."""
        self._enter("plan")
        self.hands.progress.phase("planning")
        facts = await self.target.facts()
        row = self.store.session(self.session_id)
        spec = self.store.spec(self.hands.role(Role.KNOWN_GOOD))
        listed = tuple(todo.id for todo in self.store.todos(self.session_id))
        view = View(engine=row.adoption.spec.engine, spec=spec, facts=facts, tried=listed)
        proposal = self.planner.propose(view)
        added: list[ev.Event] = [ev.TodoAdded(experiment=built_in.baseline_experiment())]
        added += [on_the_list(experiment, self.config.policy) for experiment in proposal.experiments]
        left_out = "; ".join(f"{name}: {why}" for name, why in proposal.dropped)
        decision = self.store.decide(
            self.session_id,
            kind=DecisionKind.PLAN,
            subject=self.session_id,
            what=f"{len(proposal.experiments)} experiments on the list",
            reason=proposal.reason + (f"; left out: {left_out}" if left_out else ""),
        )
        self.hands.write(*added, ev.DecisionMade(decision=decision))
        return {"next": "choose"}

    async def consult(self, state: LoopState) -> LoopState:
        """Ask the language model for more; whatever comes of it, the session goes on with what is on the list."""
        self._enter("consult")
        await self.counsel.take(await self.target.facts())
        return {"next": "choose"}

    async def refine(self, state: LoopState) -> LoopState:
        """Put on the list what follows from what was learned: what fits known-good now, and what is worth trying on."""
        self._enter("refine")
        facts = await self.target.facts()
        parent = self.store.spec(self.hands.role(Role.KNOWN_GOOD))
        listed = tuple(todo.id for todo in self.store.todos(self.session_id))
        again = self.planner.propose(View(engine=parent.engine, spec=parent, facts=facts, tried=listed))
        new = [one for one in again.experiments if forbidden(one, self.config.policy) is None]
        model = None if facts.model is None else traits(facts.model)

        def against(setting: Setting) -> str | None:
            return refiner.objection(setting, parent, self.target, self.config, model)

        self.hands.write(*refiner.refine(self.store, self.session_id, self.config, new, against))
        return {"next": "choose"}

    async def choose(self, state: LoopState) -> LoopState:
        """Take the least disruptive ready todo; with none left, the close-out or the end."""
        self._enter("choose")
        self.hands.check_stop()
        if self._closed_out():
            return {"next": "finish"}
        listen(self.hands)
        noise = self._too_noisy()
        if noise is not None:
            return self._give_up(noise)
        if self.hands.spare is not None:
            self.hands.spare.heed()
        if self.counsel.due(idle=False):
            return {"next": "consult"}
        if await self.hands.hours.ahead():
            await self.hands.hours.wait()
            return {"next": "observe"}
        if refiner.due(self.store, self.session_id, self.config, idle=False):
            return {"next": "refine"}
        due = built_in.sentinel_due(self.store, self.session_id, self.config)
        if due is not None and due.obstacle is None:
            parent = self.hands.role(Role.KNOWN_GOOD)
            self._begin(due.experiment, parent, parent, due.reason)
            return {"next": "apply"}
        if due is not None and built_in.sentinels_won(self.store, self.session_id):
            return await self._close(chooser.Choice(todo=None, reason=f"{due.reason}; another one {due.obstacle}"))
        choice = chooser.choose(situation(self.store, self.session_id, self.config))
        if choice.todo is None:
            if self.counsel.due(idle=True):
                return {"next": "consult"}
            more = refiner.due(self.store, self.session_id, self.config, idle=True)
            return {"next": "refine"} if more else await self._close(choice)
        experiment = choice.todo.experiment
        parent = self.hands.role(Role.KNOWN_GOOD)
        try:
            spec = await self._made_ready(self.store.spec(parent), experiment.changes)
        except PolicyRefused as refused:
            set_aside(self.hands, experiment, DecisionKind.BLOCK, TodoStatus.BLOCKED, refused.what)
            return {"next": "choose"}
        row = self.store.session(self.session_id)
        made = identity(spec.fingerprint, row.workload_revision, row.adoption)
        obstacle = self._obstacle(experiment, spec.fingerprint, parent, made)
        broken = broken_constraints(spec, self.config.policy)
        if obstacle is not None or broken:
            set_aside(self.hands, experiment, DecisionKind.SKIP, TodoStatus.SKIPPED, obstacle or "; ".join(broken))
            return {"next": "choose"}
        decision = self.store.decide(
            self.session_id,
            kind=DecisionKind.CHOOSE,
            subject=experiment.id,
            what=f"{experiment.title}: {', '.join(map(str, experiment.changes)) or 'observe what runs'}",
            reason=choice.reason,
        )
        self.hands.write(
            ev.SpecSeen(fingerprint=spec.fingerprint, spec=spec),
            ev.TodoChanged(experiment_id=experiment.id, identity=made, reason="chosen", by=Who.AGENT),
            ev.ComparisonOpened(experiment_id=experiment.id, parent=parent, candidate=spec.fingerprint),
            ev.DecisionMade(decision=decision),
        )
        return {"next": "apply"}

    # --- apply, measure, judge -----------------------------------------------------------------------------

    async def apply(self, state: LoopState) -> LoopState:
        """See that the configuration which the next run needs is the one that serves."""
        self._enter("apply")
        await self.hands.hours.look()
        row, comparison = self._open()
        assessment = self._assessed(comparison)
        if assessment.verdict is not None or no_time_left(self.store, self.session_id, self.config, comparison):
            return {"next": "settle"}
        need = assessment.need
        assert need is not None
        wanted = row.parent if need.arm is Arm.BASELINE else row.candidate
        position = await self.hands.where()
        if _serves(position.trial, wanted, need, comparison, self.hands.spoilt):
            return {"next": "measure"}
        if wanted != row.parent and restores_first(self.hands, row):
            await restore(self.hands, row.parent)
        busy = await self.hands.waited("requests in flight were waited for", self.hands.manners.make_way())
        if busy is not None:
            return self._postponed(busy, need, comparison, position.trial)
        trial = await self.hands.bring_up(wanted, row.experiment.id, self._relaunches(row.experiment))
        if trial.status is TrialStatus.READY:
            return {"next": "measure"}
        if wanted == row.parent:
            await restore(self.hands, wanted, failed=trial)
        return {"next": "judge"}

    async def measure(self, state: LoopState) -> LoopState:
        """Make the one run that the judge wants next."""
        self._enter("measure")
        row, comparison = self._open()
        need = self._assessed(comparison).need
        if need is None:
            return {"next": "judge"}
        wanted = row.parent if need.arm is Arm.BASELINE else row.candidate
        position = await self.hands.where()
        trial = position.trial
        if (
            trial is None
            or trial.status is not TrialStatus.READY
            or trial.fingerprint != wanted
            or trial.id in self.hands.spoilt
        ):
            return {"next": "apply"}
        await self.hands.manners.before_run(self.config.workload.point(need.load_point))
        await self.hands.hours.look()
        self.hands.hours.check()
        # A run that a former agent began is itself what the server is busy with.
        noise = None
        if not self.hands.run_under_way:
            quiet = self._wait_for_quiet(self._wait_first(comparison))
            noise = await self.hands.waited("a quiet host was waited for", quiet)
        if noise is not None:
            self.hands.void(need, comparison, trial, noise)
            return {"next": "judge"}
        taken = await self.hands.measure(need, comparison, trial, asks_answers(comparison, need))
        await heed(self.hands, taken, trial)
        return {"next": "judge"}

    async def judge(self, state: LoopState) -> LoopState:
        """Ask whether the case is clear; if not, go for the next run."""
        self._enter("judge")
        _, comparison = self._open()
        if (
            self._assessed(comparison).verdict is not None
            or hopelessly_void(comparison.own, self.config.validity) is not None
        ):
            return {"next": "settle"}
        return {"next": "apply"}

    async def settle(self, state: LoopState) -> LoopState:
        """Turn the verdict into a decision: keep, revert, block or void; `observe` then restores what must serve."""
        self._enter("settle")
        row, comparison = self._open()
        verdict = final_verdict(self.store, self.session_id, self.config, comparison)
        learned = known(self.store, self.session_id)
        trouble = blamed(learned, row.experiment.id, verdict.outcome) if row.experiment.tries else None
        if trouble is not None and trouble.step is Action.ESCALATE:
            # First of all: should we die in between, the next agent comes by here again and calls the person then.
            await bring_back(self.hands, self.hands.role(Role.KNOWN_GOOD))
        self.hands.write(*consequences(row, verdict, learned, self._ids()))
        await self.hands.guard()
        if trouble is not None and trouble.step in FINAL:
            await stop(self.hands, trouble.failure, trouble.step)
        return {"next": "finish" if row.experiment.purpose is Purpose.CLOSE_OUT else "observe"}

    async def finish(self, state: LoopState) -> LoopState:
        """Leave the final configuration serving, prove it, and close the session."""
        self._enter("finish")
        await self.hands.guard()
        final = self.hands.role(Role.KNOWN_GOOD)
        self.hands.journal.fault("finish:guarded")
        proof = await proven(self.hands, final)
        self.hands.journal.fault("finish:proven")
        await self.hands.manners.at_rest()
        lasting = await self.hands.manners.make_lasting(final)
        left = spent(self.store, self.session_id).open_s
        closed = None if left is None or left > 0 else f"the window {self.config.policy.window} is over"
        listen(self.hands, ending=True)
        why = self._too_noisy() or closed or "the list is worked off or the budget is used"
        what = (
            "the original configuration serves"
            if not kept_anything(self.store, self.session_id)
            else ("the improved configuration serves: " + "; ".join(self._kept_changes()))
        )
        end = self.store.decide(
            self.session_id,
            kind=DecisionKind.END,
            subject=proof.trial.id,
            what=what,
            reason=f"{why}; {proof.words}{lasting}{never_approved(self.store.todos(self.session_id))}",
            evidence=proof.evidence,
        )
        self.hands.write(
            ev.RoleSet(role=Role.FINAL, fingerprint=final, reason=why),
            ev.DecisionMade(decision=end),
            ev.SessionMoved(status=SessionStatus.DONE, reason=why, exit_code=0),
        )
        return {"next": "end"}

    # --- parts ---------------------------------------------------------------------------------------------

    def _enter(self, node: str) -> None:
        self.hands.journal.fault(f"node:{node}")

    def _open(self) -> tuple[ComparisonRow, Comparison]:
        row = self.store.open_comparison(self.session_id)
        assert row is not None, "apply, measure, judge and settle run only inside a comparison"
        return row, comparison_of(self.store, self.session_id, self.config, row.experiment.id)

    def _assessed(self, comparison: Comparison) -> Assessment:
        """What the judge says, who is asked once for the same runs although several steps go by it."""
        if self.assessed is None or self.assessed[0] is not comparison:
            self.assessed = comparison, assess(comparison)
        return self.assessed[1]

    def _obstacle(self, experiment: Experiment, fingerprint: str, parent: str, made: str) -> str | None:
        if experiment.changes and fingerprint == parent:
            return SERVES
        if not experiment.changes or experiment.again:
            return None
        for todo in self.store.todos(self.session_id, (IDENTITY, made)):
            if todo.id != experiment.id:
                return f"the same configuration was tried as {todo.id}"
        return None

    async def _close(self, choice: chooser.Choice) -> LoopState:
        """Nothing more to try: say what was left, then compare the final configuration with the original."""
        for experiment_id, reason in choice.skipped:
            left = ev.TodoChanged(experiment_id=experiment_id, status=TodoStatus.SKIPPED, reason=reason, by=Who.BUDGET)
            self.hands.write(left)
        if self._closed_out() or not kept_anything(self.store, self.session_id):
            return {"next": "finish"}
        if await self._leaves_one_out():
            return {"next": "apply"}
        shut = built_in.no_room_for_close_out(self.store, self.session_id, self.config)
        if shut is not None:
            return self._give_up(shut)
        decision = self.store.decide(
            self.session_id,
            kind=DecisionKind.CLOSE_OUT,
            subject=CLOSE_OUT,
            what="compare the final configuration with the original, fresh and interleaved",
            reason=choice.reason,
        )
        self.hands.write(
            ev.TodoAdded(experiment=built_in.close_out_experiment(self.store, self.session_id)),
            ev.ComparisonOpened(
                experiment_id=CLOSE_OUT,
                parent=self.hands.role(Role.ORIGINAL),
                candidate=self.hands.role(Role.KNOWN_GOOD),
            ),
            ev.DecisionMade(decision=decision),
        )
        return {"next": "apply"}

    def _closed_out(self) -> bool:
        """Whether the final comparison is made: an agent that died after it must not try a thing that it leaves out."""
        return self.store.todo(self.session_id, CLOSE_OUT) is not None

    async def _leaves_one_out(self) -> bool:
        """Begin to compare the final configuration with itself less one kept change, as far as time allows."""
        found = built_in.leave_out_due(self.store, self.session_id, self.config)
        if found is None or found[1].obstacle is not None:
            return False
        left_out, due = found
        final = self.hands.role(Role.KNOWN_GOOD)
        rest = [t.experiment for t, _ in built_in.kept(self.store, self.session_id) if t.id != left_out.id]
        original = self.store.spec(self.hands.role(Role.ORIGINAL))
        changes = tuple(change for experiment in rest for change in experiment.changes)
        try:
            spec = await self._made_ready(original, changes)
        except PolicyRefused as refused:
            self.hands.write(ev.TodoAdded(experiment=due.experiment, status=TodoStatus.SKIPPED, reason=refused.what))
            return await self._leaves_one_out()
        self.hands.write(ev.SpecSeen(fingerprint=spec.fingerprint, spec=spec))
        self._begin(due.experiment, final, spec.fingerprint, due.reason)
        return True

    async def _made_ready(self, spec: LaunchSpec, changes: tuple[Change, ...]) -> LaunchSpec:
        """The spec with the changes; what they need beside the command line is on the host then.

        Flags come last, since another version of the server may know others. Raises PolicyRefused.
        """
        bare = self.target.derive(spec, tuple(change for change in changes if change.kind not in ("flag", "env")))
        if bare.beside:
            await self.hands.stage(bare)
        return self.target.derive(spec, changes)

    def _relaunches(self, experiment: Experiment) -> bool:
        """Whether each launch of a comparison gets a process of its own: not where none may, or none need, be had."""
        allowed = self.config.policy.max_disruption >= Disruption.RESTART
        return allowed and (experiment.purpose is not Purpose.TRY or restarts(experiment))

    def _begin(self, experiment: Experiment, parent: str, candidate: str, reason: str) -> None:
        """Open a comparison that the loop makes on its own account."""
        decision = self.store.decide(
            self.session_id, kind=DecisionKind.CHOOSE, subject=experiment.id, what=experiment.title, reason=reason
        )
        self.hands.write(
            ev.TodoAdded(experiment=experiment),
            ev.ComparisonOpened(experiment_id=experiment.id, parent=parent, candidate=candidate),
            ev.DecisionMade(decision=decision),
        )

    def _too_noisy(self) -> str | None:
        """Why this host is too noisy to go on, None when it is not."""
        won = built_in.sentinels_won(self.store, self.session_id)
        if won >= built_in.SENTINEL_WINS:
            return f"too noisy to judge: the last {won} A/A sentinels showed gains of an unchanged server"
        return too_noisy(self.store, self.session_id)

    def _heal(self, reason: str) -> LoopState:
        """Known-good died or hangs although nothing of ours was to replace it."""
        decision = self.store.decide(
            self.session_id,
            kind=DecisionKind.HEAL,
            subject=self.session_id,
            what="start known-good again",
            reason=reason,
        )
        self.hands.write(ev.DecisionMade(decision=decision))
        return {"next": "heal"}

    def _ids(self) -> Ids:
        session = self.store.session(self.session_id)
        return Ids(
            decision=self.store.next_id("decisions", "D"),
            finding=self.store.next_id("findings", "F"),
            scope=scope(session),
        )

    def _postponed(self, busy: str, need: Need, comparison: Comparison, trial: Trial | None) -> LoopState:
        """The server is not restarted under its users: wait on while the budget lasts, or give the experiment up."""
        lasts = not over(self.config.policy, spent(self.store, self.session_id))
        if trial is None or (self.config.manners.when_busy == "wait" and lasts):
            return {"next": "apply"}
        self.hands.void(need, comparison, trial, busy)
        return {"next": "judge"}

    def _wait_first(self, comparison: Comparison) -> bool:
        streak = void_streak(comparison.own)
        first = not self.store.measurements(self.session_id)
        return first or bool(streak and noisy(streak[-1].reasons))

    async def _wait_for_quiet(self, cores_too: bool) -> str | None:
        """Wait with a deadline until nobody else uses the server (and the host is quiet); why not when it never was.

        Raises ForeignTraffic when somebody keeps using the server: a person has to say who may have it tonight.
        """
        waited = 0.0
        rule = self.config.validity
        while True:
            traffic = await self.target.foreign_traffic(self.config.manners.max_foreign_rps)
            busy = (await self.target.foreign_cores() if cores_too else None) or 0.0
            if traffic is None and busy <= rule.max_foreign_cpu_cores:
                return None
            disturbed = f"{busy:.2f} cores busy with other work" if traffic is None else f"{traffic} of somebody else"
            if waited >= rule.quiet_wait_s:
                if traffic is None:
                    return f"{QUIET}: not quiet within {waited:.0f} s, {disturbed}"
                raise ForeignTraffic(
                    "somebody else keeps using the server, so nothing can be measured",
                    where={"target": self.target.name, "seen": disturbed, "waited": f"{waited:.0f} s"},
                    do="find out who it is; `resume` goes on when the server is left alone",
                )
            self.hands.check()
            listen(self.hands)
            self.hands.progress.tick(f"waiting for a quiet host: {disturbed}", waited, rule.quiet_wait_s)
            await self.target.pause(QUIET_CHECK_S)
            waited += QUIET_CHECK_S

    def _give_up(self, noise: str) -> LoopState:
        """Without a final comparison, be it for noise or for time, nothing kept is confirmed: the original returns."""
        if kept_anything(self.store, self.session_id):
            original = self.hands.role(Role.ORIGINAL)
            decision = self.store.decide(
                self.session_id,
                kind=DecisionKind.REVERT,
                subject=self.session_id,
                what="the original configuration returns",
                reason=f"what was kept could not be confirmed at the end: {noise}",
            )
            self.hands.write(
                ev.DecisionMade(decision=decision),
                ev.RoleSet(role=Role.KNOWN_GOOD, fingerprint=original, reason=noise),
            )
        return {"next": "finish"}

    def _kept_changes(self) -> list[str]:
        original = self.store.spec(self.hands.role(Role.ORIGINAL))
        return self.store.spec(self.hands.role(Role.KNOWN_GOOD)).differences(original)


def _serves(trial: Trial | None, wanted: str, need: Need, comparison: Comparison, spoilt: frozenset[str]) -> bool:
    """Whether the serving launch may take the wanted run: right spec, sound, and not the launch of another block.

    Both sides of a sentinel run the same spec, and its candidate must be a launch that nothing knew before.
    """
    if trial is None or trial.status is not TrialStatus.READY or trial.fingerprint != wanted:
        return False
    if trial.id in spoilt:
        return False
    if comparison.observes:
        return True
    used = {m.trial_id for m in comparison.own if (m.arm, m.block) != (need.arm, need.block)}
    if comparison.purpose is Purpose.SENTINEL and need.arm is Arm.CANDIDATE:
        used |= {m.trial_id for m in comparison.record}
    return trial.id not in used
