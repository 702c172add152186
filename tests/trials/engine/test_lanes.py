"""Which lanes train side by side: every one once, seeds together, little filled up."""

from hypothesis import given
from hypothesis import strategies as st

from tests.trials.engine.plain import make_pack
from trials.engine.lanes import lay_out

PACK = make_pack(seeds=[3, 1, 4, 15], rates=[0.1, 0.2, 0.3])


@given(places=st.sets(st.integers(0, 11), min_size=1), at_once=st.integers(1, 20))
def test_every_living_lane_is_in_one_block(places: set[int], at_once: int):
    blocks = lay_out(PACK, sorted(places), at_once)
    assert sorted(place for block in blocks for place in block.owners) == sorted(places)
    for block in blocks:
        assert all(len(group) >= 2 for group in block.groups)
        assert len(block.slots) <= max(2, at_once)
        assert len({len(group) for group in block.groups}) == 1
        for group in block.groups:
            assert len({PACK.trials[place].seed for place in group}) == 1
        assert all(block.slots[lane] == place for place, lane in block.owners.items())
        assert len(block.slots) <= 2 * len(block.owners)  # at most half are copies


def test_a_whole_pack_is_one_rectangle():
    (block,) = lay_out(PACK, range(12), 12)
    assert block.groups == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))


def test_blocks_are_cut_between_seeds_before_within_one():
    assert [b.groups for b in lay_out(PACK, range(12), 7)] == [((0, 1, 2), (3, 4, 5)), ((6, 7, 8), (9, 10, 11))]
    assert [b.groups for b in lay_out(PACK, range(6), 2)] == [((0, 1),), ((3, 4),), ((2, 2),), ((5, 5),)]


def test_the_dead_leave_smaller_blocks():
    assert [b.groups for b in lay_out(PACK, [0, 1, 3, 4, 9], 12)] == [((0, 1), (3, 4), (9, 9))]
    assert [b.groups for b in lay_out(PACK, [0, 1, 2, 3], 12)] == [((0, 1, 2),), ((3, 3),)]


def test_a_trial_alone_in_its_pack_has_no_copy():
    (block,) = lay_out(make_pack(seeds=[3], rates=[0.1]), [0], 1)
    assert block.groups == ((0,),)


def test_seeds_of_one_setting_are_groups_of_one_lane():
    pack = make_pack(seeds=[3, 1, 4], rates=[0.1])
    assert [b.groups for b in lay_out(pack, [0, 1, 2], 2)] == [((0,), (1,)), ((2,), (2,))]
