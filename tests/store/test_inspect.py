"""What operators see of a cache: one block and what keeps it, chains as a tree, what was asked for; and Forget."""

from __future__ import annotations

import pytest

from kvstore.core.errors import UnknownBlock
from kvstore.core.keys import chain_keys
from kvstore.core.types import Durability, Outcome, Reason, Target, Tier
from kvstore.store.tables.asked_for import KEPT_S
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import STORED, World


@pytest.fixture
def world():
    made = World(host_blocks=24, device_blocks=0, disk=MemoryDisk(capacity_bytes=64 * STORED))
    yield made
    assert violations(made.store) == []
    made.close()


def branches(world, *tails):
    """Chains of three blocks that share their first two, put one after the other."""
    tokens = world.tokens
    chains = [chain_keys(world.namespace_id, [1] * (2 * tokens) + [tail] * tokens, tokens) for tail in tails]
    for keys in chains:
        world.put(keys)
    return chains


def test_a_tree_has_a_node_a_run_and_sums_below_it(world):
    left, right = branches(world, 5, 6)
    world.put(world.chain(9, 4))
    world.fetch(right)
    tree = world.store.tree(world.namespace_id)
    assert (tree.blocks, tree.hidden) == (8, 0)
    by_key = {node.key: node for node in tree.nodes}
    shared = by_key[left[0]]
    assert (shared.level, shared.blocks, shared.total_blocks) == (0, 2, 4)
    assert (by_key[left[2]].level, by_key[right[2]].level) == (1, 1)
    assert [node.key for node in tree.nodes].index(right[2]) < [node.key for node in tree.nodes].index(left[2])
    alone = by_key[world.chain(9, 4)[0]]
    assert (alone.level, alone.blocks, alone.total_blocks, alone.hidden) == (0, 4, 4, 0)
    assert shared.bytes_by_tier[1] == 4 * STORED
    assert sum(node.total_blocks for node in tree.nodes if node.level == 0) == 8


def test_a_tree_says_what_it_has_no_room_for(world):
    branches(world, 5, 6, 7)
    world.put(world.chain(9, 1))
    tree = world.store.tree(world.namespace_id, limit=2)
    assert len(tree.nodes) == 2
    assert tree.hidden + tree.nodes[0].hidden == 2 + (tree.nodes[1].level == 0) * 1 or tree.nodes[0].hidden == 2
    assert world.store.tree(world.namespace_id, limit=1).hidden == 1


def test_a_tree_begins_anew_where_a_parent_is_gone(world):
    (keys,) = branches(world, 5)
    world.cache.remove(world.namespace_id, keys[:1])
    tree = world.store.tree(world.namespace_id)
    assert [(node.level, node.blocks) for node in tree.nodes] == [(0, 2)]


def test_explain_says_what_would_go_and_what_keeps_the_rest(world):
    keys = world.chain(1, 3)
    world.put(keys)
    first, last = (world.store.explain(world.namespace_id, key) for key in (keys[0], keys[2]))
    assert [(c.tier, c.fate, c.kept) for c in first.copies] == [(Tier.HOST, "stays", ("children",))]
    assert [(c.tier, c.fate, c.kept) for c in last.copies] == [(Tier.HOST, "demoted", ())]
    assert (first.depth, last.depth, first.children, last.children) == (0, 2, 1, 0)
    world.run()
    (host, ssd) = world.store.explain(world.namespace_id, keys[2]).copies
    assert (host.fate, ssd.tier, ssd.of) == ("goes", Tier.SSD, 3)


def test_explain_names_who_keeps_a_block(world):
    keys = world.chain(1, 2)
    world.put(keys)
    world.fetch(keys, Target.IN_PLACE)
    world.store.pin("system prompt", world.namespace_id, keys[1:])
    found = world.store.explain(world.namespace_id, keys[1])
    assert {(keeper.kind, keeper.owner) for keeper in found.keepers} == {("lease", "world"), ("operator", "operator")}
    assert found.copies[0].kept[0] == "pinned"
    assert {keeper.name for keeper in found.keepers if keeper.kind == "operator"} == {"system prompt"}


def test_explain_of_what_is_gone(world):
    keys = world.chain(1, 2)
    assert world.store.explain(world.namespace_id, keys[0]).reason is Reason.NEVER_STORED
    with pytest.raises(UnknownBlock):
        world.store.explain(world.namespace_id, keys[0][:8])
    world.put(keys)
    world.cache.remove(world.namespace_id, keys)
    world.clock.advance(7)
    found = world.store.explain(world.namespace_id, keys[1])
    assert (found.reason, found.copies) == (Reason.REMOVED, ())
    assert found.seconds_ago == pytest.approx(7)


def test_evict_says_why_a_block_stays_and_what_it_could_not_free(world):
    keys = world.chain(1, 3)
    world.put(keys)
    report = world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys[:1])
    assert (report.outcomes, report.kept) == ((Outcome.BUSY,), ("children",))
    world.fetch(keys, Target.IN_PLACE)
    report = world.store.evict(Tier.HOST, nbytes=STORED)
    assert (report.blocks, report.kept_bytes) == (0, 3 * STORED)


def test_forget_goes_in_steps_and_leaves_what_is_kept(world):
    chains = [world.chain(n, 4) for n in range(4)]
    for keys in chains:
        world.put(keys, durability=Durability.DURABLE)
    world.store.pin("keep", world.namespace_id, chains[3][:1])
    first = world.store.forget(world.namespace_id, 1)
    assert first.removed >= 1
    assert first.left == 16 - first.removed
    second = world.store.forget(world.namespace_id, 100)
    assert (first.removed + second.removed, second.kept, second.left) == (15, 1, 1)
    assert world.residency(chains[3])[:1] != ()
    assert world.store.forget(world.namespace_id, 100, stop=lambda: True).removed == 0


def test_nothing_is_recorded_until_it_is_asked_for_and_after_a_minute(world):
    keys = world.chain(1, 3)
    world.put(keys)
    world.cache.match(world.namespace_id, keys)
    begin = world.store.trace()
    assert begin.entries == ()
    world.cache.match(world.namespace_id, world.chain(1, 4))
    world.cache.match(world.namespace_id, keys)
    found = world.store.trace(begin.sequence)
    assert [(len(entry.prefix_ids), entry.matched) for entry in found.entries] == [(4, 3), (3, 3)]
    assert found.entries[0].prefix_ids[:3] == found.entries[1].prefix_ids
    assert len(set(found.entries[0].prefix_ids)) == 4
    assert found.entries[0].block_tokens == world.tokens
    assert world.store.trace(found.sequence).entries == ()
    world.clock.advance(KEPT_S + 1)
    world.cache.match(world.namespace_id, keys)
    assert world.store.trace(found.sequence).entries == ()


def test_a_recording_says_what_it_lost(world, monkeypatch):
    monkeypatch.setattr("kvstore.store.tables.asked_for.ENTRIES_MAX", 2)
    begin = world.store.trace()
    world.cache.match(world.namespace_id, world.chain(1, 1))
    after = world.store.trace(begin.sequence).sequence
    for n in range(5):
        world.cache.match(world.namespace_id, world.chain(n, 1))
    found = world.store.trace(after)
    assert (len(found.entries), found.lost) == (2, 3)
