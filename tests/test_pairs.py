"""A covering array covers what it says, in few rows, the same ones every time."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st
from pairs import covering, in_pairs
from table import RECIPES, SCHEDULES, SPECS, graph_meets, graph_rows, met, plan_meets, plan_rows


def pairs_of(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return {*combinations(enumerate(row), 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.data())
def test_every_two_entries_of_two_axes_meet(sizes: list[int], data: st.DataObject) -> None:
    """Where they do in any row at all: some rows are not possible."""
    every = [*product(*map(range, sizes))]
    rows = data.draw(st.lists(st.sampled_from(every), unique=True, max_size=200)) if len(every) > 1 else every
    chosen = covering(rows, pairs_of)
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, rows))
    assert chosen == sorted(chosen, key=rows.index)
    assert chosen == covering(rows, pairs_of)


def test_few_rows_stand_for_a_product() -> None:
    """Of 10 x 10 x 10 x 10 rows not many more than the 100 that two axes have."""
    assert 100 <= len(covering([*product(range(10), repeat=4)], pairs_of)) <= 150
    assert len(covering([*product(range(4), range(3))], pairs_of)) == 12
    assert covering([], pairs_of) == []


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.sampled_from([1, 2]))
def test_rows_by_day_have_what_they_say_and_those_of_the_night_the_rest(sizes: list[int], meet: int) -> None:
    rows, meet = in_pairs(*map(range, sizes), meet=meet), min(meet, len(sizes) - 1)
    day = [row.values for row in rows if not row.marks]
    assert [row.values for row in rows] == [*product(*map(range, sizes))]
    met, every = (
        {m for x in of for m in combinations(enumerate(x), meet)} for of in (day, product(*map(range, sizes)))
    )
    assert met == every
    assert meet == 2 or len(day) == max(sizes)


def test_by_day_the_table_of_laws_has_every_spec_and_each_recipe_with_each_setting_and_schedule() -> None:
    """And each schedule with each setting; at night it is the whole product."""
    graphs, plans = graph_rows(), plan_rows()
    assert {x.values for x in graphs} == {*product(RECIPES, SPECS)}
    assert {x.values for x in plans} == {*product(RECIPES, SPECS, SCHEDULES)}
    assert len({name for spec in SPECS for name, _ in met(spec)}) > 30
    assert len({*map(met, SPECS)}) > len(SPECS) * 0.9, "specs differ in what they set"
    for rows, meets in ((graphs, graph_meets), (plans, plan_meets)):
        day = [x.values for x in rows if not x.marks]
        assert {x[1] for x in day} == {*SPECS}
        assert {m for x in day for m in meets(x)} == {m for x in rows for m in meets(x.values)}
    day = [x.values for x in plans if not x.marks]
    assert {(x[0], x[2]) for x in day} == {*product(RECIPES, SCHEDULES)}
    assert len(day) < 0.06 * len(plans)
