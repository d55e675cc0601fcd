"""What to try beyond the list: further values of what worked, and settings together that were never tried together.

Pure: it gets what was learned and a source of further points, and returns experiments. It asks no host and measures
nothing, and a setting that nobody wrote down is only ever a number between known ones or within the catalogue's span.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pydantic import Field

from agent.catalogue.knowledge import PlainChange
from agent.levers import Lever, Point, Range, Setting, defaults_of, levers, moved, number, plain, point, together
from agent.policy import needed_disruption
from agent.surrogate import Guess, Seen, guesses
from state.models import Disruption, Effect, EnvChange, Experiment, FlagChange, Frozen, LaunchSpec, Outcome, Source

AT_ONCE = 3
"""So many are added at a time: the next ones shall know what came of these."""
FURTHER = 12
"""Points that are asked for at a time."""
WORTH = 0.25
"""An idea is worth its launches when its expected improvement is at least this part of the smallest relevant gain."""
PATIENCE = 4
"""After so many refinements that came to nothing in a row the next one has to promise twice as much."""
MIDDLE, SUNK, MOVES = 0.5, 0.1, 0.05
"""Priority of what promises nothing and costs nothing, of what does not promise enough, and the least change of one."""
BELIEVED = 0.5
"""What a catalogue hopes for is believed by half: most of what is hoped for is not found."""
AGAIN = 2
"""So often what did not start all at once is tried with less."""
JOINS = 0.15
"""What joins others has to promise at least this part of what the best of them does: any of them may keep the server
from starting, and then nothing is learned of the rest."""
REPEATS = 2
"""So often what came to no clear end is measured once more."""
MOST_AT_ONCE = 8
"""More changes than this are never made together: nobody could tell any more what a failure is due to."""
SETTINGS = 2
"""So many are moved at once on purpose; points that move more come only from the sampler."""
RECENT = 200
"""Of so many of the newest experiments the effects are weighed, so that the thousandth costs no more; all are known."""
STAYS = "as it is"
"""A lever that is left alone."""
IGNORED = 0.3
"""Standard error of what a collapse or a run that complained says."""
OWN = "refine-"
NOT_MEASURED = frozenset({Outcome.FAILED, Outcome.INVALID, Outcome.OBSERVED})


class Tried(Frozen):
    """One judged experiment: between which configurations, and what came of it."""

    experiment: Experiment
    parent: LaunchSpec
    candidate: LaunchSpec
    outcome: Outcome
    effect: Effect | None = None
    cause: str = ""
    """Why it did not start."""


class Learned(Frozen):
    """All that refinement goes by; `ideas` is everything that is or was on the list and that the session allows."""

    engine: str
    found: LaunchSpec
    known_good: LaunchSpec
    ideas: tuple[Experiment, ...]
    pending: tuple[Experiment, ...]
    priorities: dict[str, float] = Field(default_factory=dict)
    """Those of what is pending and may be moved; what a person has put in its place is not among them."""
    barred: tuple[Setting, ...] = ()
    """What a person dropped or has not approved yet, and what the session forbids: it is in nothing that is offered."""
    set_aside: tuple[Setting, ...] = ()
    """What was passed over for another reason: it is not offered again, but may be part of something else."""
    tried: tuple[Tried, ...]
    minimal_effect: float
    made: int = 0
    """The number of the last refinement before."""
    seed: int = 0


class Candidate(Frozen):
    """Settings that could be made on known-good, and what is expected of them."""

    setting: Setting
    what: str
    why: str
    again: Experiment | None = None
    """What it repeats."""
    mean: float = 0.0
    spread: float = 0.0

    @property
    def hoped(self) -> float:
        """See `Guess.hoped`."""
        return Guess(mean=self.mean, spread=self.spread).hoped


class Reweighed(Frozen):
    """A todo's priority by what was measured of its settings, and why."""

    id: str
    priority: float
    reason: str


Choices = dict[str, str | float]
Space = dict[str, tuple[str, ...] | Range]
Asker = Callable[[Space, Sequence[tuple[Choices, float | None]], int, int], list[Choices]]
"""A sampler: the space, the known points with what they did (None: never started), how many are wanted, a seed."""
Objects = Callable[[Setting], bool]


def refinements(learned: Learned, ask: Asker, objects: Objects) -> list[Experiment]:
    """The experiments that are worth most now, best first; none when nothing is left that is worth its launches.

    `objects` says whether a setting cannot be made on known-good, or may not.
    """
    moves = levers(learned.engine, _written(learned.ideas), learned.found)
    model = _Model(learned, moves)
    offered = {one.setting: one for one in (*_further(moves, model, ask), *_combined(moves, model))}
    fresh = [one for one in offered.values() if one.setting and not model.is_known(one.setting) and model.dares(one)]
    worth = WORTH * math.log1p(learned.minimal_effect) * (1 + _fruitless(learned) / PATIENCE)
    chosen: list[Candidate] = []
    for one in sorted(
        model.weighed([*fresh, *_unclear(model)]), key=lambda one: (-round(one.hoped, 9), len(one.setting), one.what)
    ):
        if one.hoped < worth or len(chosen) == AT_ONCE:
            break
        if not any(_overlaps(one, other) for other in chosen) and not objects(one.setting):
            chosen.append(one)
    return [_experiment(one, learned, moves, place) for place, one in enumerate(chosen, learned.made + 1)]


def all_at_once(learned: Learned, objects: Objects) -> list[Experiment]:
    """What promises most, made together as the very first experiment; none where fewer than two ideas go together.

    One comparison then tells what would take one for each, and what of it does not help is found by going back on
    single settings. Where it did not start it is tried again without what the refusal speaks of, else with its better
    half; where it was worse, without the ideas that change the numbers a model computes with, if it had any.
    """
    moves = levers(learned.engine, learned.pending, learned.found)
    model = _Model(learned, moves)
    held = _gathered(_promising(learned), model, objects)
    setting = together(plain(idea) for idea in held) if len(held) >= SETTINGS else None
    if setting is None or len(learned.tried) > AGAIN:
        return []
    (told,) = model.weighed([Candidate(setting=setting, what=label(setting), why="what promises most, all at once")])
    return [_experiment(told, learned, moves, learned.made + 1).model_copy(update={"priority": 1.0})]


def _promising(learned: Learned) -> list[Experiment]:
    """The ideas to be made at once, best first, by what became of the attempts before."""
    found = [
        idea
        for idea in learned.pending
        if plain(idea) and idea.tier == 1 and idea.expected_gain >= learned.minimal_effect
    ]
    found.sort(key=lambda idea: (-idea.expected_gain, -idea.priority, idea.id))
    for one in learned.tried:
        if one.outcome is not Outcome.FAILED:
            found = [idea for idea in found if not idea.numerics]
            continue
        names = {change.name for change in plain(one.experiment)}
        parts = [idea for idea in found if {*plain(idea)} <= {*plain(one.experiment)}]
        blamed = {name for name in names if _speaks_of(one.cause, name)}
        sound = [idea for idea in parts if not blamed & {change.name for change in plain(idea)}]
        found = sound if len(sound) < len(parts) else parts[: len(parts) // 2]
    return found


def _gathered(ideas: Sequence[Experiment], model: _Model, objects: Objects) -> list[Experiment]:
    """Of each lever the best idea, as far as they go together."""
    held: list[Experiment] = []
    for idea in ideas:
        more = together(plain(one) for one in (*held, idea))
        names = {change.name for one in held for change in plain(one)}
        clashes = more is None or any(change.name in names for change in plain(idea))
        serves = not model.needed((plain(idea),))
        if more is None or clashes or serves or len(more) > MOST_AT_ONCE or model.is_barred(model.after(more)):
            continue
        if idea.expected_gain < JOINS * max((one.expected_gain for one in held), default=0.0):
            continue
        if not objects(more):
            held.append(idea)
    return held


def reweighed(learned: Learned) -> list[Reweighed]:
    """What is pending, where its settings were measured in something else: how much it promises on known-good now."""
    moves = levers(learned.engine, learned.pending, learned.found)
    model = _Model(learned, moves)
    known = [one for one in learned.pending if one.id in learned.priorities and plain(one) and model.measured(one)]
    weighed = model.weighed([Candidate(setting=plain(one), what=one.id, why="") for one in known])
    found = []
    for one in weighed:
        promises = one.hoped >= WORTH * math.log1p(learned.minimal_effect)
        priority = round(min(1.0, MIDDLE + one.hoped) if promises else SUNK, 3)
        if abs(priority - learned.priorities[one.what]) >= MOVES:
            found.append(
                Reweighed(id=one.what, priority=priority, reason=f"by what was measured it does {_likely(one)}")
            )
    return found


def _written(ideas: Sequence[Experiment]) -> list[Experiment]:
    """What somebody wrote down: combinations of combinations would have no end."""
    return [idea for idea in ideas if idea.source.kind != "refinement"]


def _fruitless(learned: Learned) -> int:
    """How many refinements in a row came to nothing."""
    count = 0
    for one in reversed(learned.tried):
        if one.outcome is Outcome.BETTER or one.experiment.source.kind != "refinement":
            break
        count += 1
    return count


def _overlaps(one: Candidate, other: Candidate) -> bool:
    """Whether one holds all of the other: the smaller is tried first, and the larger then on what it shows."""
    mine, theirs = {*one.setting}, {*other.setting}
    return mine <= theirs or theirs <= mine


# --- what is known ---------------------------------------------------------------------------------------------


class _Model:
    """What was learned, as points of the levers' names."""

    def __init__(self, learned: Learned, moves: Sequence[Lever]) -> None:
        self.learned = learned
        self.moves = moves
        self.defaults = defaults_of(learned.engine)
        self.topics: dict[str, frozenset[str]] = {}
        for lever in moves:
            for name in lever.names:
                self.topics[name] = self.topics.get(name, frozenset()) | lever.tags
        self.found = self.at(learned.found)
        self.known_good = self.at(learned.known_good)
        self.hopes = [
            (moved({}, plain(idea), self.defaults), BELIEVED * math.log1p(max(0.0, idea.expected_gain)))
            for idea in _written(learned.ideas)
            if plain(idea)
        ]
        self.tried = [(one, self.at(one.parent), self.at(one.candidate)) for one in learned.tried]
        self.recent = self.tried[-RECENT:]
        self.seen = [_seen(*one) for one in self.recent if one[0].outcome not in NOT_MEASURED]
        self.turned = frozenset(name for one in self.seen for name in one.base if one.base[name] != one.to[name])
        listed = (*map(plain, learned.pending), *learned.set_aside)
        waits = (self.after(setting) for setting in listed if setting)
        settled = (self.known_good, *(at for _, _, at in self.tried), *waits)
        self.settled = {frozenset(at.items()) for at in settled}
        self.barred = [moved({}, setting, self.defaults) for setting in learned.barred]
        self.regions = [region for one in self.tried if (region := self._region(*one))]
        self.closed = self._closed()

    def at(self, spec: LaunchSpec) -> dict[str, str]:
        """A configuration at all names."""
        return point(spec, self.topics)

    def after(self, setting: Setting) -> dict[str, str]:
        """Known-good with a setting made."""
        return moved(self.known_good, setting, self.defaults)

    def hope(self, at: Point) -> float:
        """What is expected of a point before anything is measured: the sum of what its ideas are believed to bring."""
        held = (gain for sets, gain in self.hopes if _holds(at, sets) and not _holds(self.found, sets))
        return sum(held)

    def weighed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates with what they would gain over known-good."""
        points = [self.after(one.setting) for one in candidates]
        told = guesses(points, self.known_good, self.seen, self.hope, self.topics)
        return [
            one.model_copy(update={"mean": guess.mean, "spread": guess.spread})
            for one, guess in zip(candidates, told, strict=True)
        ]

    def is_known(self, setting: Setting) -> bool:
        """Whether it is not to be offered: it serves, was tried, waits, is barred, cannot start, or failed before."""
        at = self.after(setting)
        if frozenset(at.items()) in self.settled or frozenset(setting) in self.closed:
            return True
        return self.is_barred(at) or any(_holds(at, region) for region in self.regions)

    def is_barred(self, at: Point) -> bool:
        """Whether it holds something that must not be tried and that does not serve already."""
        return any(_holds(at, sets) and not _holds(self.known_good, sets) for sets in self.barred)

    def dares(self, one: Candidate) -> bool:
        """Whether at most one of its settings is new to this server: of two that never ran, either may be refused."""
        names = {change.name for change in one.setting}
        touched = [names & {*lever.names} for lever in self.moves if names & {*lever.names}]
        return sum(not some & self.turned for some in touched) <= 1

    def measured(self, idea: Experiment) -> bool:
        """Whether something that was measured differs from its parent in a setting of the idea."""
        names = [change.name for change in plain(idea)]
        return any(one.base[name] != one.to[name] for one in self.seen for name in names)

    def worked(self) -> frozenset[str]:
        """The names that a kept change is about."""
        kept = (one for one in self.learned.tried if one.outcome is Outcome.BETTER)
        return frozenset(change.name for one in kept for change in plain(one.experiment))

    def values(self) -> list[tuple[dict[str, str], float | None]]:
        """The tried points with what they do over what was found; None for what never started."""
        ran = [at for one, _, at in self.recent if one.outcome not in NOT_MEASURED]
        told = guesses(ran, self.found, self.seen, self.hope, self.topics)
        failed = [at for one, _, at in self.recent if one.outcome is Outcome.FAILED]
        return [
            (self.found, 0.0),
            *((at, guess.mean) for at, guess in zip(ran, told, strict=True)),
            *((at, None) for at in failed),
        ]

    def needed(self, settings: Iterable[Setting]) -> list[Setting]:
        """Those that known-good does not hold already."""
        return [one for one in settings if not _holds(self.known_good, moved({}, one, self.defaults))]

    def _region(self, one: Tried, before: Point, failed: Point) -> dict[str, str]:
        """Where the server refuses to start, by a refused start; empty where it says nothing of the levers.

        What was changed then is to blame together with what the refusal names and with whatever shares a topic with
        it; a point that differs in one of these is open, one that differs elsewhere only is not. Where more was
        changed than flags and variables, a patch for one, that may be to blame as well.
        """
        blamed = {name for name in failed if failed[name] != before[name]}
        if one.outcome is not Outcome.FAILED or not blamed or not plain(one.experiment):
            return {}
        topics = frozenset(topic for name in blamed for topic in self.topics[name])
        blamed |= {name for name in failed if self.topics[name] & topics or _speaks_of(one.cause, name)}
        return {name: failed[name] for name in failed if name in blamed}

    def _closed(self) -> frozenset[frozenset[PlainChange]]:
        """Changes that were tried before, where nothing that shares a topic with them was kept since."""
        closed: set[frozenset[PlainChange]] = set()
        kept_since: frozenset[str] = frozenset()
        for one in reversed(self.learned.tried):
            names = {change.name for change in plain(one.experiment)}
            if not any(self.topics.get(name, frozenset()) & kept_since for name in names):
                closed.add(frozenset(plain(one.experiment)))
            if one.outcome is Outcome.BETTER:
                kept_since |= {*one.experiment.tags}
        return frozenset(closed)


def _seen(one: Tried, base: dict[str, str], to: dict[str, str]) -> Seen:
    effect, error = math.log(0.5), IGNORED
    if one.effect is not None and one.outcome is not Outcome.COLLAPSED:
        effect, error = one.effect.estimate, (one.effect.high - one.effect.low) / (2 * 1.96)
    return Seen(base=base, to=to, effect=effect, error=error)


def _holds(at: Point, sets: Mapping[str, str]) -> bool:
    return all(at.get(name) == value for name, value in sets.items())


def _speaks_of(cause: str, name: str) -> bool:
    """Whether a refusal speaks of a flag or variable, however it spells it: by at least half of the name's words."""
    said, words = {*_WORD.findall(cause.lower())}, _WORD.findall(name.lower())
    return 2 * sum(word in said for word in words) >= len(words) > 0


_WORD = re.compile(r"[a-z0-9]+")


# --- where further points come from ------------------------------------------------------------------------------


def _combined(moves: Sequence[Lever], model: _Model) -> Iterator[Candidate]:
    """Every setting by itself and every two of different levers: interactions are tried on purpose."""
    for some in itertools.chain.from_iterable(itertools.combinations(moves, n) for n in range(1, SETTINGS + 1)):
        for settings in itertools.product(*(lever.settings for lever in some)):
            setting = together(model.needed(settings))
            if setting is not None:
                together_ = len(some) > 1
                why = "never tried together" if together_ else "on what was kept since it was tried"
                yield Candidate(setting=setting, what=label(setting), why=why)


def _unclear(model: _Model) -> Iterator[Candidate]:
    """What came to no clear end on known-good, to be measured once more: more is known of the noise by now."""
    ends: dict[Setting, list[Tried]] = {}
    for one, before, _ in model.tried:
        if plain(one.experiment) and before == model.known_good:
            ends.setdefault(plain(one.experiment), []).append(one)
    for setting, told in ends.items():
        first = told[0].experiment
        waits = any(plain(idea) == setting for idea in model.learned.pending)
        if len(told) <= REPEATS and not waits and all(one.outcome is Outcome.INCONCLUSIVE for one in told):
            yield Candidate(setting=setting, what=label(setting), why=f"{first.id} came to no clear end", again=first)


def _further(moves: Sequence[Lever], model: _Model, ask: Asker) -> Iterator[Candidate]:
    """What the sampler would try next: settings of every lever, and numbers in the range of what worked."""
    worked = model.worked()
    space: Space = {}
    for lever in moves:
        ranged = lever.range if {*lever.names} & worked else None
        space[lever.name] = ranged or (STAYS, *(label(setting) for setting in lever.settings))
    told = [(_choices(at, moves, space), value) for at, value in model.values()]
    if not space:
        return
    for picked in ask(space, told, FURTHER, model.learned.seed + model.learned.made):
        settings = [_picked(lever, picked[lever.name]) for lever in moves]
        setting = together(model.needed(one for one in settings if one)) or ()
        if 0 < len(setting) <= MOST_AT_ONCE:
            yield Candidate(setting=setting, what=label(setting), why="near what did best so far")


def label(setting: Setting) -> str:
    """A setting in words, by which it is told from all others."""
    return ", ".join(map(str, setting))


def _picked(lever: Lever, choice: str | float) -> Setting:
    if isinstance(choice, str):
        return next((setting for setting in lever.settings if label(setting) == choice), ())
    text = str(int(choice)) if choice == int(choice) else f"{choice:.3g}"
    name = lever.names[0]
    return (FlagChange(name=name, value=text) if name.startswith("-") else EnvChange(name=name, value=text),)


def _choices(at: Point, moves: Sequence[Lever], space: Space) -> Choices:
    """The point as the sampler's dimensions have it."""
    found: Choices = {}
    for lever in moves:
        limits = space[lever.name]
        value = number(at[lever.names[0]]) if isinstance(limits, Range) else None
        held = (label(setting) for setting in lever.settings if _holds(at, moved({}, setting, {})))
        if isinstance(limits, Range) and value is not None:
            found[lever.name] = min(max(value, limits.low), limits.high)
        else:
            found[lever.name] = next(held, STAYS)
    return found


# --- what comes of it ----------------------------------------------------------------------------------------


def _likely(one: Candidate) -> str:
    return f"{math.expm1(one.mean):+.1%}, give or take {math.expm1(one.spread):.1%}"


def _experiment(one: Candidate, learned: Learned, moves: Sequence[Lever], place: int) -> Experiment:
    """What is put on the list: a repeat is what it repeats in all but what is hoped of it now."""
    return (one.again or _made_of(one, learned, moves)).model_copy(
        update={
            "id": f"{OWN}{place}",
            "again": "" if one.again is None else one.again.again or one.again.id,
            "hypothesis": f"{one.why}; by what was measured so far it does {_likely(one)}",
            "priority": min(1.0, MIDDLE + one.hoped),
            "expected_gain": math.expm1(one.hoped),
            "source": Source(kind="refinement"),
        }
    )


def _made_of(one: Candidate, learned: Learned, moves: Sequence[Lever]) -> Experiment:
    """The setting as an experiment that is tagged, needs and disrupts as the ideas that are in it."""
    names = {change.name for change in one.setting}
    touched = [lever for lever in moves if names & {*lever.names}]
    ideas = [idea for idea in learned.ideas if any(idea.id in lever.ideas for lever in touched)]
    held = [idea for idea in ideas if {*plain(idea)} <= {*one.setting}]
    unwritten = [lever for lever in touched if not any({*setting} <= {*one.setting} for setting in lever.settings)]
    near = [[idea for idea in ideas if idea.id in lever.ideas] for lever in unwritten]
    needs = [need for idea in held for need in idea.needs]
    needs += [need for group in near for need in group[0].needs if all(need in idea.needs for idea in group)]
    return Experiment(
        title=one.what,
        hypothesis="",
        changes=one.setting,
        tags=tuple(dict.fromkeys(tag for idea in ideas for tag in idea.tags)),
        needs=tuple(dict.fromkeys(needs)),
        numerics=any(idea.numerics for idea in ideas),
        disruption=max((needed_disruption(idea) for idea in itertools.chain(held, *near)), default=Disruption.RESTART),
    )
