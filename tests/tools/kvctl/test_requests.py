"""What commands send and what they say of the answer: each option reaches the daemon, each outcome has its words."""

from __future__ import annotations

import pytest

from kvstore.core.errors import UnknownBlock
from kvstore.core.keys import chain_keys
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import tier_letters
from kvstore.v1 import admin_pb2, cache_pb2, common_pb2
from tests.tools.kvctl.test_tables import tables

HIT, MISS, BUSY = common_pb2.OUTCOME_HIT, common_pb2.OUTCOME_MISS, common_pb2.OUTCOME_BUSY
MIB = 1 << 20
KEY, OTHER = b"\x07" * 32, b"\x08" * 32
TOKENS = "1,2,3,4,5,6,7,8"


def last(daemon, method):
    return next(request for name, request in reversed(daemon.asked) if name == method)


@pytest.fixture
def two(daemon, namespace):
    """Two namespaces: what a command does to one must not reach the other."""
    other = admin_pb2.NamespaceInfo(namespace_id=b"\x05" * 32, name="other")
    other.spec.model, other.spec.block_tokens = "other-model", 8
    daemon.replies["Admin/ListNamespaces"].namespaces.append(other)
    return namespace, other


# ---------------------------------------------------------------- match and why


def test_match_asks_for_the_namespace_that_was_named(kvctl, daemon, two):
    daemon.replies["Cache/Match"] = cache_pb2.MatchResponse(matched=1, residency=[1])
    for name, info, blocks in (("smol", two[0], 2), ("other", two[1], 1)):
        ran = kvctl("match", "--tokens", TOKENS, "-n", name, "-o", "json")
        request = last(daemon, "Cache/Match")
        assert request.namespace_id == info.namespace_id
        keys = chain_keys(info.namespace_id, range(1, 9), info.spec.block_tokens)
        assert request.keys == b"".join(keys)
        assert (ran.json["blocks"], ran.json["tokens"]) == (blocks, 8)
        assert ran.code == (Exit.OK if blocks == 1 else Exit.NO)


def test_match_of_keys_shows_runs_of_blocks(kvctl, daemon, namespace):
    daemon.replies["Cache/Match"] = cache_pb2.MatchResponse(matched=4, residency=[7, 7, 4, 1])
    ran = kvctl("match", *(bytes([n] * 32).hex() for n in range(1, 5)))
    assert ran.code == Exit.OK
    assert ran.out.splitlines()[0] == "4 of 4 blocks matched: 16 of 16 tokens"
    assert tables(ran.out)[-1] == [
        {"Blocks": "0-1", "Count": "2", "Tiers": "DEVICE HOST SSD"},
        {"Blocks": "2", "Count": "1", "Tiers": "SSD"},
        {"Blocks": "3", "Count": "1", "Tiers": "DEVICE"},
    ]
    assert "miss" not in ran.out
    assert ran.err == ""


def test_a_miss_names_its_block_and_reason(kvctl, daemon, namespace):
    daemon.replies["Cache/Match"] = cache_pb2.MatchResponse(
        matched=1, residency=[2], reason=common_pb2.REASON_TIER_UNAVAILABLE
    )
    ran = kvctl("match", KEY.hex(), OTHER.hex())
    assert "block 1 (080808080808) is a miss: tier unavailable" in ran.out
    assert ran.err == "kvctl why, with the same options, says more\n"


def test_a_match_in_batches_ends_at_the_first_miss(kvctl, daemon, namespace):
    def reply(request):
        near = [cache_pb2.NearNamespace(namespace_id=b"\x03" * 32, fields=["dtype"], blocks=1)]
        count = len(request.keys) // 32 - 1
        reason = common_pb2.REASON_EVICTED
        return cache_pb2.MatchResponse(matched=count, residency=[2] * count, reason=reason, near=near)

    daemon.replies["Cache/Match"] = reply
    found = kvctl("match", "--tokens", "-", "-o", "json", stdin=" ".join(map(str, range(4 * 5000)))).json
    assert (found["matched"], len(found["residency"]), found["reason"]) == (4095, 4095, "evicted")
    assert [near["fields"] for near in found["near"]] == [["dtype"]]
    assert [method for method, _ in daemon.asked].count("Cache/Match") == 1


@pytest.mark.parametrize("command", ["match", "why"])
@pytest.mark.parametrize("more", [("--tokens", TOKENS), ("--text", "a")])
def test_keys_beside_tokens_are_refused(kvctl, daemon, namespace, command, more):
    ran = kvctl(command, KEY.hex(), *more)
    assert (ran.code, ran.out) == (Exit.USAGE, "")
    assert "KEY is given beside --tokens or --text; expected one of them" in ran.err
    assert [method for method, _ in daemon.asked if method != "Admin/ListNamespaces"] == []


@pytest.mark.parametrize("command", ["match", "why"])
def test_no_question_at_all_is_refused(kvctl, namespace, command):
    ran = kvctl(command)
    assert (ran.code, ran.out) == (Exit.USAGE, "")
    assert "--tokens and --text is neither" in ran.err


def test_less_than_a_block_is_no_question(kvctl, daemon, namespace):
    for command in ("why", "match"):
        ran = kvctl(command, "--tokens", "1,2,3")
        assert (ran.code, ran.out) == (Exit.USAGE, "")
        assert "--tokens is 3 tokens; expected 4 at least, one whole block" in ran.err


def test_why_of_keys_and_of_a_whole_prompt(kvctl, daemon, two):
    answer = admin_pb2.WhyResponse(blocks=2, matched=2, residency=[2, 2])
    daemon.replies["Admin/Why"] = answer
    ran = kvctl("why", KEY.hex(), OTHER.hex(), "-n", "other")
    assert ran.code == Exit.OK
    assert tables(ran.out)[0] == [{"Blocks": "0-1", "Count": "2", "Tiers": "HOST"}]
    assert ran.out.endswith("All 2 blocks are here.\n")
    request = last(daemon, "Admin/Why")
    assert (request.keys, list(request.token_ids)) == (KEY + OTHER, [])
    assert request.namespace_id == two[1].namespace_id
    assert kvctl("why", KEY.hex(), "-n", "other", "-o", "json").json["matched"] == 2
    answer.matched, answer.reason = 1, common_pb2.REASON_PARENT_MISSING
    ran = kvctl("why", KEY.hex(), "-n", "other", "-o", "json")
    assert (ran.code, ran.json["reason"]) == (Exit.NO, "parent_missing")
    ran = kvctl("why", KEY.hex(), "-n", "other")
    assert "is a miss: parent missing\n" in ran.out
    assert "ago" not in ran.out


def test_why_of_nothing_that_is_here_begins_with_the_answer(kvctl, daemon, namespace):
    answer = admin_pb2.WhyResponse(blocks=1, key=KEY, reason=common_pb2.REASON_NEVER_STORED)
    answer.near.add(namespace_id=b"\x05" * 32, fields=["dtype", "rope"], blocks=1)
    daemon.replies["Admin/Why"] = answer
    assert kvctl("why", "--tokens", TOKENS).out.splitlines() == [
        "Block 0 of 1 (070707070707) is a miss: never stored",
        "Namespace 050505050505 differs in dtype, rope and has 1 block.",
    ]


@pytest.mark.parametrize(
    ("bits", "words"), [(0, "-"), (1, "DEVICE"), (2, "HOST"), (4, "SSD"), (5, "DEVICE SSD"), (7, "DEVICE HOST SSD")]
)
def test_residency_in_words(bits, words):
    assert tier_letters(bits) == words


# ---------------------------------------------------------------- keys and namespaces


def test_a_start_of_a_key_that_nobody_has_is_not_found(kvctl, daemon, two):
    daemon.replies["Admin/ShowBlock"] = UnknownBlock("no resident block begins with 07070707")
    for words in (("match", "07070707"), ("pin", "x", "07070707"), ("evict", "--tier", "host", "07070707")):
        ran = kvctl(*words, "-n", "other")
        assert (ran.code, ran.err) == (Exit.NOT_FOUND, "kvctl: no resident block begins with 07070707\n")
    assert last(daemon, "Admin/ShowBlock").namespace_id == two[1].namespace_id


def test_a_namespace_is_found_by_more_digits_in_either_case(kvctl, daemon, two):
    two[1].namespace_id = b"\xab" * 32
    daemon.replies["Admin/ListNamespaces"].namespaces[1].namespace_id = b"\xab" * 32
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse()
    assert kvctl("ls", "ABAB").code == Exit.OK
    assert last(daemon, "Admin/ListBlocks").namespace_id == b"\xab" * 32


def test_a_daemon_without_namespaces_says_so(kvctl, daemon):
    daemon.replies["Admin/ListNamespaces"] = admin_pb2.ListNamespacesResponse()
    ran = kvctl("match", "--tokens", TOKENS)
    assert (ran.code, ran.out) == (Exit.NOT_FOUND, "")
    assert "knows no namespace yet" in ran.err


# ---------------------------------------------------------------- changes


@pytest.mark.parametrize(("word", "tier", "name"), [("device", 1, "DEVICE"), ("Host", 2, "HOST"), ("ssd", 3, "SSD")])
def test_evict_says_from_where(kvctl, daemon, namespace, word, tier, name):
    daemon.replies["Admin/Evict"] = admin_pb2.EvictResponse(blocks=1, bytes=3 * MIB, outcomes=[HIT, MISS])
    ran = kvctl("evict", KEY.hex(), "--tier", word)
    assert (ran.code, ran.out, ran.err) == (Exit.OK, f"1 block, 3 MiB, left {name}\n", "")
    request = last(daemon, "Admin/Evict")
    assert (request.tier, request.keys, request.bytes) == (tier, KEY, 0)
    assert request.namespace_id == namespace.namespace_id


def test_evict_by_bytes_needs_no_namespace(kvctl, daemon):
    daemon.replies["Admin/Evict"] = admin_pb2.EvictResponse(blocks=2, bytes=5)
    ran = kvctl("evict", "--bytes", "1.5KiB", "--tier", "ssd", "-o", "json")
    assert (ran.code, ran.json) == (Exit.OK, {"blocks": 2, "bytes": 5, "outcomes": [], "kept": [], "kept_bytes": 0})
    ((method, request),) = daemon.asked
    assert (method, request.bytes, request.tier, request.namespace_id) == ("Admin/Evict", 1536, 3, b"")


def test_blocks_that_stay_are_counted(kvctl, daemon, namespace):
    daemon.replies["Admin/Evict"] = admin_pb2.EvictResponse(outcomes=[BUSY, HIT, BUSY])
    ran = kvctl("evict", KEY.hex(), "--tier", "host")
    assert ran.code == Exit.REFUSED
    assert ran.err == "2 blocks stayed: leased, pinned or in flight; see kvctl leases\n"
    ran = kvctl("evict", KEY.hex(), "--tier", "host", "-o", "json")
    assert (ran.code, ran.json["outcomes"]) == (Exit.REFUSED, ["busy", "hit", "busy"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((KEY.hex(),), "--tier is not given; expected device, host or ssd"),
        (("--bytes", "1MiB"), "--tier is not given; expected device, host or ssd"),
        (("--tier", "host"), "KEY and --bytes is neither; expected one of them"),
        ((KEY.hex(), "--tier", "host", "--bytes", "1"), "KEY and --bytes is both; expected one of them"),
        ((KEY.hex(), "--tier", "tape"), "--tier is 'tape'; expected device, host or ssd"),
        (("--tier", "host", "--bytes", "much"), "--bytes is 'much'"),
    ],
)
def test_what_evict_misses_is_named(kvctl, namespace, words, said):
    ran = kvctl("evict", *words)
    assert (ran.code, ran.out) == (Exit.USAGE, "")
    assert said in ran.err


def test_pin_by_tokens(kvctl, daemon, two):
    daemon.replies["Admin/Pin"] = admin_pb2.PinResponse(outcomes=[HIT])
    ran = kvctl("pin", "system", "--tokens", TOKENS, "-n", "other")
    assert (ran.code, ran.out, ran.err) == (Exit.OK, "1 of 1 block pinned as system\n", "")
    request = last(daemon, "Admin/Pin")
    assert (request.name, request.namespace_id) == ("system", two[1].namespace_id)
    assert request.keys == chain_keys(two[1].namespace_id, range(1, 9), 8)[0]
    daemon.replies["Admin/Pin"] = admin_pb2.PinResponse(outcomes=[MISS])
    ran = kvctl("pin", "system", "--tokens", TOKENS, "-n", "other", "-o", "json")
    assert (ran.code, ran.json) == (Exit.NO, {"outcomes": ["miss"]})
    assert kvctl("pin", "system", "--tokens", TOKENS, "-n", "other").err == "the others are not resident\n"


def test_unpin_of_everything_and_of_some(kvctl, daemon, two):
    daemon.replies["Admin/Unpin"] = admin_pb2.UnpinResponse(released=2)
    ran = kvctl("unpin", "system")
    assert (ran.code, ran.out, ran.err) == (Exit.OK, "2 blocks released\n", "")
    request = last(daemon, "Admin/Unpin")
    assert (request.name, request.namespace_id, request.keys) == ("system", b"", b"")
    assert kvctl("unpin", "system", KEY.hex(), "-n", "other", "-o", "json").json == {"released": 2}
    request = last(daemon, "Admin/Unpin")
    assert (request.namespace_id, request.keys) == (two[1].namespace_id, KEY)
    daemon.replies["Admin/Unpin"] = admin_pb2.UnpinResponse()
    ran = kvctl("unpin", "system")
    assert (ran.code, ran.err) == (Exit.NOT_FOUND, "nothing is pinned as system\n")


def test_drain_in_words(kvctl, daemon):
    daemon.replies["Admin/Drain"] = admin_pb2.DrainResponse(draining=True, flushed_blocks=4)
    ran = kvctl("drain")
    assert (ran.code, ran.out, ran.err) == (Exit.OK, "draining; 4 blocks written to SSD\n", "")
    assert (last(daemon, "Admin/Drain").timeout_ms, last(daemon, "Admin/Drain").resume) == (108_000, False)
    daemon.replies["Admin/Drain"] = admin_pb2.DrainResponse(draining=True, unflushed_blocks=2)
    assert kvctl("drain").err == "2 blocks are still only in memory\n"
    assert kvctl("drain", "-o", "json").json["unflushed_blocks"] == 2
    daemon.replies["Admin/Drain"] = admin_pb2.DrainResponse()
    ran = kvctl("drain", "--resume")
    assert (ran.code, ran.out) == (Exit.OK, "takes new blocks again\n")


def test_compact_in_words(kvctl, daemon):
    daemon.replies["Admin/Compact"] = admin_pb2.CompactResponse(
        segments=1, bytes_rewritten=2 * MIB, bytes_freed=3 * MIB
    )
    ran = kvctl("compact")
    assert (ran.code, ran.out) == (Exit.OK, "1 segment rewritten: 2 MiB moved, 3 MiB freed\n")
    assert last(daemon, "Admin/Compact").fragmentation == 0
    assert kvctl("compact", "-o", "json").json["bytes_freed"] == 3 * MIB
    assert kvctl("compact", "--above", "1.5").code == Exit.USAGE


@pytest.mark.parametrize(
    ("words", "seconds"),
    [(("drain",), 120.0), (("compact",), 600.0), (("verify",), 3600.0), (("quarantine",), 10.0), (("leases",), 10.0)],
)
def test_commands_that_take_long_wait_longer(kvctl, daemon, words, seconds):
    daemon.replies["Admin/Drain"] = admin_pb2.DrainResponse()
    daemon.replies["Admin/Compact"] = admin_pb2.CompactResponse()
    daemon.replies["Admin/Verify"] = admin_pb2.VerifyResponse()
    daemon.replies["Admin/ListQuarantine"] = admin_pb2.ListQuarantineResponse()
    daemon.replies["Admin/ListLeases"] = admin_pb2.ListLeasesResponse()
    kvctl(*words)
    assert daemon.timeouts == [seconds]


def test_verify_of_a_namespace_and_of_blocks(kvctl, daemon, two):
    daemon.replies["Admin/Verify"] = admin_pb2.VerifyResponse(
        blocks=3, bytes=MIB, bad=2, bad_keys=[KEY, OTHER], seconds=2
    )
    ran = kvctl("verify")
    assert ran.code == Exit.NO
    assert ran.out.splitlines() == [
        "3 blocks, 1 MiB, read in 2.0 s, 512 KiB/s; 2 bad", f"bad: {KEY.hex()}", f"bad: {OTHER.hex()}",
    ]  # fmt: skip
    request = last(daemon, "Admin/Verify")
    assert (request.namespace_id, request.keys, request.bytes_per_second) == (b"", b"", 0)
    kvctl("verify", "-n", "other", "--rate", "2KiB")
    request = last(daemon, "Admin/Verify")
    assert (request.namespace_id, request.keys, request.bytes_per_second) == (two[1].namespace_id, b"", 2048)
    ran = kvctl("verify", KEY.hex(), "-n", "smol", "-o", "json")
    request = last(daemon, "Admin/Verify")
    assert (request.namespace_id, request.keys) == (two[0].namespace_id, KEY)
    assert (ran.code, ran.json["bad_keys"]) == (Exit.NO, [KEY.hex(), OTHER.hex()])


@pytest.mark.parametrize("more", [(KEY.hex(),), ("--namespace", "smol"), ("--rate", "1MiB")])
def test_an_offline_check_takes_no_questions_of_a_daemon(kvctl, daemon, tmp_path, more):
    ran = kvctl("verify", "--offline", str(tmp_path), *more)
    assert (ran.code, daemon.asked) == (Exit.USAGE, [])
    assert "no KEY, --namespace or --rate beside it" in ran.err
    assert kvctl("verify", "--offline", str(tmp_path / "none")).code == Exit.USAGE
