"""The judge of answers, on passes made up step by step: which word, why, and what it must not be misled by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest

from agent.judge.answers import CLOSE_EDIT, FAR, FEWEST, NOISE_DRIFT, Likeness, compare, likeness
from state.models import Answer
from tools.simulated_answers import simulated_answers

DATA = Path(__file__).resolve().parents[1] / "data" / "answers"
PROMPTS = 12
STEPS = 10
OWN = -0.5
NEAR, UNLIKELY = 0.1, FAR + 0.5


def answer(
    prompt: int, parts_at: int = STEPS, said: str = "other", gap: float = NEAR, moved: float = 0.0, steps: int = STEPS
) -> Answer:
    """Ten steps, at each of which `other` is `gap` less likely; from `parts_at` on something else is said."""
    tokens = tuple(f" w{step}" for step in range(parts_at))
    tokens += () if parts_at >= steps else (f" {said}", *(f" {said}{step}" for step in range(parts_at + 1, steps)))
    rivals = {" other": gap, " third": 4.0, " fourth": 4.5, " last": 5.0}
    tops = tuple({token: OWN - moved} | {name: OWN - moved - less for name, less in rivals.items()} for token in tokens)
    logprobs = tuple(top[token] for top, token in zip(tops, tokens, strict=True))
    return Answer(prompt=f"p{prompt}", text="".join(tokens), tokens=tokens, logprobs=logprobs, tops=tops)


def one_pass(
    differ: int = 0, first: int = 0, parts_at: int = 4, said: str = "other", gap: float = NEAR
) -> tuple[Answer, ...]:
    """A pass where `differ` prompts, from `first` on, part from the usual answer, by default after four steps."""
    parting = range(first, first + differ)
    return tuple(
        answer(number, parts_at if number in parting else STEPS, said=said, gap=gap) for number in range(PROMPTS)
    )


def parents(gap: float = NEAR, *passes: tuple[Answer, ...]) -> list[tuple[Answer, ...]]:
    """The usual answers, with a rival `gap` less likely at each step; twice, unless passes are given."""
    usual = tuple(answer(number, gap=gap) for number in range(PROMPTS))
    return [usual, *(passes or (usual,))]


def bare(one: Sequence[Answer]) -> tuple[Answer, ...]:
    """A pass of a server that gives no logprobs."""
    return tuple(each.model_copy(update={"tokens": (), "logprobs": (), "tops": ()}) for each in one)


def failing(one: Sequence[Answer], count: int, error: str | None = "HTTP 500: no") -> tuple[Answer, ...]:
    """A pass whose first answers failed, or are empty."""
    return tuple(Answer(prompt=each.prompt, error=error) if place < count else each for place, each in enumerate(one))


def recorded(name: str) -> tuple[Answer, ...]:
    told = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return tuple(Answer.model_validate(one) for one in told)


# --- the words -------------------------------------------------------------------------------------------------------


def test_equal_answers_are_the_same() -> None:
    found = likeness(parents(), [one_pass()])
    assert (found.word, found.reason) == ("same", "all answers are as before")
    assert found.candidate is not None and found.parent is not None
    assert (found.candidate.exact, found.candidate.edit, found.candidate.prefix, found.candidate.drift) == (1, 0, 1, 0)
    assert (found.candidate.gap, found.candidate.bad, found.parent.exact) == (None, 0, 1)


@pytest.mark.parametrize(
    ("differ", "gap", "word"),
    [
        (1, NEAR, "same"),
        (2, NEAR, "close"),
        (12, NEAR, "close"),
        (1, UNLIKELY, "close"),
        (5, UNLIKELY, "close"),
        (6, UNLIKELY, "broken"),
        (12, UNLIKELY, "broken"),
        (12, FAR - 0.01, "close"),
        (12, FAR, "broken"),
    ],
)
def test_how_many_part_and_how_unlikely_it_was_decide(differ: int, gap: float, word: str) -> None:
    found = likeness(parents(gap), [one_pass(differ)])
    assert found.word == word
    assert found.candidate is not None
    assert found.candidate.gap == pytest.approx(gap)
    assert found.candidate.exact == pytest.approx(1 - differ / PROMPTS)


def test_a_close_answer_tells_how_nearly_undecided_the_parent_was() -> None:
    found = likeness(parents(), [one_pass(5)])
    assert found.reason == "5 of 12 answers differ, where the parent preferred its own by 0.10 (median)"
    found = likeness(parents(UNLIKELY), [one_pass(3)])
    assert found.reason.endswith("; in 3 of them clearly")


def test_a_broken_model_is_told_by_what_the_parent_would_clearly_not_say() -> None:
    found = likeness(parents(UNLIKELY), [one_pass(7)])
    assert found.reason == "in 7 of 12 answers the parent clearly preferred something else"


def test_what_was_no_alternative_is_as_unlikely_as_the_last_one_at_least() -> None:
    pair = compare(answer(0), answer(0, parts_at=3, said="unheard"))
    assert pair.gap == pytest.approx(5.0) and pair.far and pair.prefix == pytest.approx(0.3)
    assert likeness(parents(), [one_pass(1, said="unheard")]).word == "close"
    found = likeness(parents(), [one_pass(2, said="unheard")])
    assert (found.word, found.reason) == (
        "broken",
        "in 2 of 12 answers the parent clearly preferred something else, and in 2 none of its alternatives was said",
    )


@pytest.mark.parametrize(("listed", "far"), [(5, True), (4, True), (3, False), (1, False)])
def test_where_nothing_is_likely_the_alternatives_decide(listed: int, far: bool) -> None:
    """The parent was sure of nothing: its alternatives are so alike that the gap says little."""
    top = {f" t{place}": -2.0 - place / 10 for place in range(listed)}
    flat = Answer(prompt="p", text=" t0", tokens=(" t0",), logprobs=(-2.0,), tops=(top,))
    pair = compare(flat, answer(0, parts_at=0, said="unheard"))
    assert pair.gap is not None and pair.gap < FAR and pair.far == far


def test_other_numbers_behind_equal_words_are_close() -> None:
    moved = [tuple(answer(number, moved=3 * NOISE_DRIFT) for number in range(PROMPTS))]
    found = likeness(parents(), moved)
    assert (found.word, found.reason) == (
        "close",
        "all answers are as before, but their logprobs moved by 0.030 on average",
    )
    assert likeness(parents(), [tuple(answer(n, moved=NOISE_DRIFT / 2) for n in range(PROMPTS))]).word == "same"


# --- the parent's own spread -----------------------------------------------------------------------------------------


def test_what_the_parent_does_itself_is_the_same() -> None:
    parent = parents(NEAR, one_pass(4), one_pass(4, first=4), one_pass(4, first=8))
    found = likeness(parent, [one_pass(4, said="new", first=2)])
    assert found.parent is not None and found.parent.exact == 0.75
    assert found.word == "broken", "four new tokens that were no alternative"
    found = likeness(parent, [one_pass(4, first=2, parts_at=6)])
    assert (found.word, found.reason) == (
        "same",
        "8 of 12 answers are as before, and the parent's own repetitions differ as much",
    )
    assert likeness(parent, [one_pass(8, first=2, parts_at=6)]).word == "close"


def test_an_answer_counts_as_before_if_the_parent_gave_it_once() -> None:
    assert likeness(parents(NEAR, one_pass(6)), [one_pass(6)]).word == "same"
    assert likeness(parents(NEAR, one_pass(6)), [one_pass(6)]).reason == "all answers are as before"


def test_a_parent_that_wanders_far_itself_makes_nobody_broken() -> None:
    wild = [one_pass(6, said=f"wild{number}") for number in range(3)]
    assert likeness(wild, [one_pass(6, said="wild9")]).word == "same"
    assert likeness(wild[:1], [one_pass(6, said="wild9")]).word == "broken", "one pass shows no spread"


def test_one_pass_of_the_parent_is_enough_to_tell_broken_from_close() -> None:
    assert likeness(parents()[:1], [one_pass()]).word == "same"
    found = likeness(parents()[:1], [one_pass(1)])
    assert (found.word, found.parent) == ("close", None)
    assert likeness(parents(UNLIKELY)[:1], [one_pass(6)]).word == "broken"


def test_neither_the_order_of_passes_nor_their_number_changes_the_word() -> None:
    parent = parents(UNLIKELY, one_pass(2, gap=UNLIKELY), one_pass(1, first=5, gap=UNLIKELY))
    candidates = [one_pass(10), one_pass(11), one_pass(12)]
    found = {likeness(p, c).word for p in permutations(parent) for c in permutations(candidates)}
    assert found == {"broken"}
    for differ, word in ((1, "close"), (5, "close"), (6, "broken")):
        assert {likeness(parents(UNLIKELY), [one_pass(differ)] * n).word for n in (1, 2, 5)} == {word}


# --- answers that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failed", "word", "reason"),
    [
        (1, "unknown", "1 of 12 answers failed or are empty, the others tell no broken model"),
        (2, "broken", "2 of 12 answers failed or are empty"),
        (12, "broken", "12 of 12 answers failed or are empty"),
    ],
)
@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("error", ["HTTP 500: no", None])
def test_failed_and_empty_answers_are_no_numerics(
    failed: int, word: str, reason: str, logprobs: bool, error: str | None
) -> None:
    candidate = failing(one_pass(), failed, error)
    passes = (parents(), candidate) if logprobs else ([bare(one) for one in parents()], bare(candidate))
    found = likeness(passes[0], [passes[1]])
    assert (found.word, found.reason) == (word, reason)


def test_one_failure_is_told_beside_what_else_is_broken() -> None:
    found = likeness(parents(UNLIKELY), [failing(one_pass(9), 1)])
    assert found.reason == (
        "1 of 12 answers failed or are empty; in 8 of 12 answers the parent clearly preferred something else"
    )


def test_where_the_parent_failed_there_is_nothing_to_fail_at() -> None:
    lame = [failing(one_pass(), 2), failing(one_pass(), 2)]
    assert likeness(lame, [failing(one_pass(), 2)]).word == "same"
    found = likeness(lame, [one_pass()])
    assert found.word == "same" and found.candidate is not None and found.candidate.prompts == 10
    empty = [failing(one_pass(), 2, None), failing(one_pass(), 2, None)]
    assert likeness(empty, [failing(one_pass(), 2, None)]).word == "same"


def test_an_end_that_was_nearly_as_likely_is_no_failure() -> None:
    ended = Answer(prompt="p0", text="", tokens=(" other",), logprobs=(OWN,), tops=({" other": OWN},))
    assert not compare(answer(0), ended).failed
    assert likeness(parents(), [(ended, *one_pass()[1:])]).word == "same"


# --- without logprobs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differ", "parts_at", "word"),
    [
        (0, 0, "same"),
        (1, 0, "same"),
        (4, 2, "close"),
        (12, 7, "close"),
        (12, 4, "unknown"),
        (7, 0, "unknown"),
        (12, 0, "broken"),
        (12, 1, "broken"),
    ],
)
def test_texts_alone_are_broken_only_when_hardly_a_word_is_left(differ: int, parts_at: int, word: str) -> None:
    parent = [bare(one) for one in parents()]
    found = likeness(parent, [bare(one_pass(differ, parts_at=parts_at))])
    assert found.word == word, found.reason
    assert found.candidate is not None
    assert (found.candidate.drift, found.candidate.gap) == (None, None)


@pytest.mark.parametrize("side", ["parent", "candidate"])
def test_logprobs_of_one_side_alone_are_texts_alone(side: str) -> None:
    parent, candidate = parents(UNLIKELY), [one_pass(12, parts_at=4)]
    assert likeness(parent, candidate).word == "broken"
    if side == "parent":
        assert likeness(parent, [bare(one) for one in candidate]).word == "unknown"
    else:  # the parent's alternatives are not known, so the candidate's logprobs say nothing
        assert likeness([bare(one) for one in parent], candidate).word == "unknown"


def test_the_parents_own_wandering_is_taken_off_the_texts() -> None:
    wild = [bare(one_pass(12, parts_at=3, said=f"wild{number}")) for number in range(3)]
    found = likeness(wild, [bare(one_pass(12, parts_at=3, said="wild9"))])
    assert found.word == "same" and found.parent is not None and found.parent.edit > CLOSE_EDIT


def test_steps_without_alternatives_tell_nothing() -> None:
    """Drafted tokens have neither logprob nor alternatives, and an answer may end without a word about the end."""
    drafted = answer(0).model_copy(update={"tops": ({},) * STEPS, "logprobs": (None,) * STEPS})
    pair = compare(drafted, answer(0, parts_at=4))
    assert (pair.gap, pair.drift, pair.told, pair.failed) == (None, None, False, False)
    pair = compare(answer(0), answer(0, steps=4, parts_at=4))
    assert (pair.gap, pair.prefix, pair.edit) == (None, 0.4, 0.6)


# --- too little ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parent", "candidate", "count"),
    [
        ([], [one_pass()], 0),
        (parents(), [], 0),
        (parents(), [one_pass()[: FEWEST - 1]] * 3, FEWEST - 1),
        ([one_pass()[:6]], [one_pass()[6:]], 0),
        ([failing(one_pass(), 10)], [one_pass()], 2),
    ],
)
def test_too_few_answers_are_unknown(
    parent: list[tuple[Answer, ...]], candidate: list[tuple[Answer, ...]], count: int
) -> None:
    found = likeness(parent, candidate)
    assert found == Likeness(word="unknown", reason=f"only {count} answers can be held against the parent's")


def test_prompts_that_were_not_asked_count_for_nothing() -> None:
    found = likeness(parents(), [one_pass()[:10]])
    assert found.word == "same" and found.candidate is not None and found.candidate.prompts == 10


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "edit"),
    [
        ("a b c d", "a b c d", 0.0),
        ("a b c d", "a x c d", 0.25),
        ("a b c d", "a c d", 0.25),
        ("b c d", "a b c d", 0.25),
        ("a b c d", "d c b a", 1.0),
        ("a b", "", 1.0),
        ("", "", 0.0),
        ("a  b", "a b", 0.0),
    ],
)
def test_edits_are_counted_over_the_longer_answer(left: str, right: str, edit: float) -> None:
    pair = compare(Answer(prompt="p", text=left), Answer(prompt="p", text=right))
    assert pair.edit == edit and pair.exact == (left == right)


@pytest.mark.parametrize(
    ("name", "word", "of_texts", "median_gap"),
    [
        ("parent", "same", "same", None),
        ("flash_attention", "close", "close", 0.07),
        ("cache_8_bits", "close", "close", 0.07),
        ("cache_4_bits", "close", "unknown", 0.42),
        ("rope_half", "broken", "broken", 1.53),
        ("weights_1_percent_lost", "broken", "broken", 1.02),
    ],
)
def test_real_answers_are_judged_as_when_they_were_given(
    name: str, word: str, of_texts: str, median_gap: float | None
) -> None:
    """One pass each of the demo's server, with the change that the file is named after."""
    parent, candidate = recorded("parent"), recorded(name)
    found = likeness([parent], [candidate])
    assert (found.word, likeness([bare(parent)], [bare(candidate)]).word) == (word, of_texts)
    assert found.candidate is not None and found.candidate.gap == (
        None if median_gap is None else pytest.approx(median_gap, abs=0.005)
    )


@pytest.mark.parametrize("word", ["same", "close", "broken"])
def test_simulated_servers_answer_as_their_scenario_says(word: str) -> None:
    parent = [simulated_answers(1, "same")] * 2
    assert likeness(parent, [simulated_answers(1, word)]).word == word  # type: ignore[arg-type]
    assert likeness(parent[:1], [simulated_answers(1, word)]).word == word  # type: ignore[arg-type]
