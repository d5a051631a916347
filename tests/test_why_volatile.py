"""Fields that change by themselves: what is taken for one, and how far texts agree without them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheslide_agents.prompt.volatile import agreement, volatile_fields


@pytest.mark.parametrize(
    ("text", "kind", "field"),
    [
        ("Now: 2024-03-04 09:30.", "time stamp", "2024-03-04 09:30"),
        ("at 2024-03-04T09:30:11.250Z!", "time stamp", "2024-03-04T09:30:11.250Z"),
        ("at 2024-03-04T09:30:11+01:00", "time stamp", "2024-03-04T09:30:11+01:00"),
        ("(Mon Mar  4 09:30:00 2024)", "time stamp", "Mon Mar  4 09:30:00 2024"),
        ("Monday, March 4, 2024 at 9:30 AM", "time stamp", "Monday, March 4, 2024 at 9:30 AM"),
        ("ts=1709543400", "time stamp", "1709543400"),
        ("ts=1709543400.25", "time stamp", "1709543400.25"),
        ("Today is March 4, 2024.", "date", "March 4, 2024"),
        ("Today is 4 March 2024.", "date", "4 March 2024"),
        ("due 04/03/2024", "date", "04/03/2024"),
        ("The time is 09:31 now", "time", "09:31"),
        ("550e8400-e29b-41d4-a716-446655440000", "uuid", "550e8400-e29b-41d4-a716-446655440000"),
        ("request req_a8b7c6d5e4 came", "id", "req_a8b7c6d5e4"),
        ("commit deadbeef12", "id", "deadbeef12"),
        ("messages in recall memory: 132\n", "counter", "132"),
        ("step 12 begins", "counter", "12"),
        ("used 43 % so far", "counter", "43"),
        ("shown 20 of 80 rows", "counter", "20"),
        ("It has 17 messages", "counter", "17"),
    ],
)
def test_a_field_is_found_whole_and_named(text: str, kind: str, field: str) -> None:
    found = volatile_fields(text)
    assert (found[0].kind, found[0].text) == (kind, field)
    assert text[found[0].start : found[0].stop] == field


@pytest.mark.parametrize(
    "text",
    [
        "She has 4 cats.",
        "Written in 1851 by him",
        "version 3.5-rc",
        "a decade",
        "top-10",
        "COVID-19",
    ],
)
def test_numbers_that_belong_to_the_text_are_left_alone(text: str) -> None:
    assert volatile_fields(text) == []


@given(st.text(alphabet="ab1-: /\n2024", max_size=60))
def test_fields_are_ordered_disjoint_and_spelled_as_in_the_text(text: str) -> None:
    found = volatile_fields(text)
    borders = [place for field in found for place in (field.start, field.stop)]
    assert borders == sorted(borders)
    assert all(text[field.start : field.stop] == field.text for field in found)


def test_texts_that_differ_in_such_fields_only_agree_to_their_ends() -> None:
    old = "Today is March 4, 2024. Step 3 of 9. Ann sails."
    new = "Today is March 15, 2024. Step 10 of 9. Ann sails."
    found = agreement(new, old)
    assert (found.stop, found.other_stop) == (len(new), len(old))
    assert [(mine.text, theirs.text) for mine, theirs in found.changed] == [
        ("March 15, 2024", "March 4, 2024"),
        ("10", "3"),
    ]


def test_texts_agree_up_to_the_first_change_that_is_no_such_field() -> None:
    old = "It is 09:30. Ann lives in Oslo. It rains."
    new = "It is 10:45. Ann lives in Lima. It rains at 10:45."
    found = agreement(new, old)
    assert new[: found.stop] == "It is 10:45. Ann lives in "
    assert old[: found.other_stop] == "It is 09:30. Ann lives in "
    assert [mine.text for mine, _ in found.changed] == ["10:45"]


def test_a_field_that_became_another_kind_is_a_change_of_text() -> None:
    found = agreement("seen 2024-03-04 by Ann", "seen 09:30 by Ann")
    assert (found.stop, found.other_stop, found.changed) == (5, 5, ())


@given(st.text(max_size=40), st.text(max_size=40))
def test_agreement_without_fields_is_the_common_head(left: str, right: str) -> None:
    left, right = (text.translate({ord(d): None for d in "0123456789"}) for text in (left, right))
    if not (volatile_fields(left) or volatile_fields(right)):
        head = 0
        while head < min(len(left), len(right)) and left[head] == right[head]:
            head += 1
        assert agreement(left, right).stop == head
