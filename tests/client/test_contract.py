"""One contract, four ways to the same store: embedded, session socket, gRPC with shared memory, gRPC from afar."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore.cache import CommitEntry
from kvstore.client import Client, ClientOptions, Control, PutBlocks
from kvstore.core.errors import (
    InvalidArgument,
    NamespaceMismatch,
    UnknownJob,
    UnknownLease,
    UnknownNamespace,
    UnknownReservation,
)
from kvstore.core.keys import parents_of
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import (
    Area,
    Codec,
    Durability,
    JobId,
    LeaseId,
    NamespaceId,
    Outcome,
    Reason,
    ReservationId,
    Target,
    Tier,
)
from kvstore.store.config import StoreConfig
from kvstore.store.embedded import build_store
from kvstore.tiers.coding import decode_block
from kvstore.tiers.ssd import SsdConfig, SsdTier
from tests.client.harness import blocks_of, chain, payload, small_spec

LOCAL = ("embedded", "socket", "grpc")
REMOTE = ("remote",)
_salts = itertools.count()


@pytest.fixture(scope="module")
def embedded_store(tmp_path_factory):
    disk = SsdTier(str(tmp_path_factory.mktemp("ssd")), SsdConfig(capacity_bytes=64 << 20))
    store = build_store(StoreConfig(), host_bytes=16 << 20, device_bytes=4 << 20, disk=disk)
    yield store
    store.close()


def make_cache(kind, request):
    if kind == "embedded":
        return request.getfixturevalue("embedded_store").open_session("embedded", buffer_bytes=4 << 20)
    daemon = request.getfixturevalue("daemon")
    if kind == "remote":
        return Client(f"grpc://127.0.0.1:{daemon.port}", ClientOptions(strict=True))
    control = Control.GRPC if kind == "grpc" else Control.SOCKET
    return Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=4 << 20, control=control))


@pytest.fixture(params=LOCAL)
def cache(request):
    made = make_cache(request.param, request)
    yield made
    made.close()


@pytest.fixture(params=LOCAL + REMOTE)
def any_cache(request):
    made = make_cache(request.param, request)
    yield made
    made.close()


@pytest.fixture
def writer(request, daemon):
    """A client that fills the daemon for those that can not write places."""
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=4 << 20)) as made:
        yield made


@pytest.fixture
def spec():
    """A namespace of its own for each test."""
    return small_spec(salt=str(next(_salts)).encode())


def write_places(cache, places, payloads, layout):
    for place, data in zip(places, payloads, strict=True):
        memory = np.frombuffer(cache.memory(place.area), np.uint8)
        for layer in range(layout.layers):
            begin = place.offset + layer * place.stride
            chunk = data[layer * layout.slice_bytes : (layer + 1) * layout.slice_bytes]
            memory[begin : begin + layout.slice_bytes] = np.frombuffer(chunk, np.uint8)


def read_place(cache, place, layout, layers=None):
    memory = cache.memory(place.area)
    size = layout.of_codec(place.codec)[0]
    count = layout.layers if layers is None else layers
    return b"".join(bytes(memory[place.offset + n * place.stride :][:size]) for n in range(count))


def store_chain(cache, spec, blocks, **commit):
    """Put a chain by the two-phase calls; returns namespace, layout, keys."""
    opened = cache.open_namespace(spec)
    keys, tokens = chain(opened.namespace_id, blocks)
    reserved = cache.reserve(opened.namespace_id, Tier.HOST, keys=keys)
    assert reserved.outcomes == (Outcome.PENDING,) * blocks
    assert {place.area for place in reserved.places} == {Area.BUFFER}
    write_places(cache, reserved.places, [payload(opened.layout, key) for key in keys], opened.layout)
    parents = [bytes(32), *keys[:-1]]
    entries = [CommitEntry(*row) for row in zip(reserved.reservation_ids, keys, parents, strict=True)]
    committed = cache.commit(opened.namespace_id, entries, token_ids=tokens, **commit)
    assert committed.outcomes == (Outcome.HIT,) * blocks
    assert committed.existed == (False,) * blocks
    return opened.namespace_id, opened.layout, keys


class TestNamespaces:
    def test_open_answers_id_and_layout_and_is_idempotent(self, any_cache, spec):
        first = any_cache.open_namespace(spec)
        again = any_cache.open_namespace(spec)
        assert first.namespace_id == spec.namespace_id == again.namespace_id
        assert first.layout == again.layout == BlockLayout.of(spec)
        assert (first.created, again.created) == (True, False)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("dtype", "bfloat16"),
            ("rope", '{"theta":500000}'),
            ("revision", "other"),
            ("salt", b"other tenant"),
            ("block_tokens", 32),
        ],
    )
    def test_another_spec_hits_nothing_and_names_the_field(self, cache, spec, field, value):
        namespace, _, keys = store_chain(cache, spec, 2)
        model = small_spec(salt=spec.salt, model=f"m{next(_salts)}")
        cache.open_namespace(model)
        other = cache.open_namespace(small_spec(**{"salt": spec.salt, "model": model.model, field: value}))
        found = cache.match(other.namespace_id, keys)
        assert (found.matched, found.reason) == (0, Reason.NEVER_STORED)
        assert any(near.namespace_id == model.namespace_id and near.fields == (field,) for near in found.near)
        assert cache.match(namespace, keys).matched == 2

    def test_a_name_bound_to_another_spec_is_refused_with_the_field(self, any_cache, spec):
        name = f"name {next(_salts)}"
        any_cache.open_namespace(spec, name=name)
        with pytest.raises(NamespaceMismatch) as caught:
            any_cache.open_namespace(small_spec(salt=spec.salt, dtype="bfloat16"), name=name)
        assert "dtype" in caught.value.field
        assert any_cache.open_namespace(spec, name=name).created is False

    def test_unknown_namespace(self, any_cache):
        with pytest.raises(UnknownNamespace) as caught:
            any_cache.match(NamespaceId(bytes(32)), [bytes(32)])
        assert caught.value.field == "namespace_id"


class TestWriting:
    def test_nothing_is_visible_before_commit(self, cache, spec):
        opened = cache.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 2)
        reserved = cache.reserve(opened.namespace_id, Tier.HOST, keys=keys)
        assert cache.match(opened.namespace_id, keys).matched == 0
        assert cache.abort(reserved.reservation_ids) == 2
        assert cache.match(opened.namespace_id, keys).matched == 0

    def test_match_stops_at_the_first_gap(self, cache, spec):
        namespace, _, keys = store_chain(cache, spec, 3)
        stranger = bytes([1]) * 32
        assert cache.match(namespace, keys).matched == 3
        assert cache.match(namespace, [keys[0], stranger, keys[2]]).matched == 1
        assert cache.match(namespace, [stranger]).reason is Reason.NEVER_STORED

    def test_resident_keys_need_no_write(self, cache, spec):
        namespace, _, keys = store_chain(cache, spec, 2)
        reserved = cache.reserve(namespace, Tier.HOST, keys=keys)
        assert reserved.outcomes == (Outcome.HIT,) * 2
        assert reserved.reservation_ids == (0, 0)

    def test_double_commit_is_refused_and_changes_nothing(self, cache, spec):
        opened = cache.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 1)
        reserved = cache.reserve(opened.namespace_id, Tier.HOST, keys=keys)
        write_places(cache, reserved.places, [payload(opened.layout, keys[0])], opened.layout)
        entry = CommitEntry(reserved.reservation_ids[0], keys[0], bytes(32))
        assert cache.commit(opened.namespace_id, [entry]).outcomes == (Outcome.HIT,)
        with pytest.raises(UnknownReservation):
            cache.commit(opened.namespace_id, [entry])
        assert cache.match(opened.namespace_id, keys).matched == 1

    def test_wrong_tokens_are_refused(self, cache, spec):
        opened = cache.open_namespace(spec)
        keys, tokens = chain(opened.namespace_id, 1)
        reserved = cache.reserve(opened.namespace_id, Tier.HOST, keys=keys)
        entry = CommitEntry(reserved.reservation_ids[0], keys[0], bytes(32))
        with pytest.raises(InvalidArgument) as caught:
            cache.commit(opened.namespace_id, [entry], token_ids=[token + 1 for token in tokens])
        assert caught.value.field == "keys[0]"

    def test_anonymous_device_places_are_named_at_commit(self, cache, spec):
        opened = cache.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 1)
        lease = cache.grant_lease("tail", 30_000)
        reserved = cache.reserve(opened.namespace_id, Tier.DEVICE, count=1)
        data = payload(opened.layout, keys[0])
        write_places(cache, reserved.places, [data], opened.layout)
        entry = CommitEntry(reserved.reservation_ids[0], keys[0], bytes(32))
        committed = cache.commit(opened.namespace_id, [entry], lease_id=lease)
        assert [place.area for place in committed.places] == [Area.DEVICE]
        assert read_place(cache, committed.places[0], opened.layout) == data
        assert cache.match(opened.namespace_id, keys).residency[0] & Tier.DEVICE.bit
        cache.release(lease)

    def test_durable_commit_is_on_ssd(self, cache, spec):
        namespace, _, keys = store_chain(cache, spec, 2, durability=Durability.DURABLE)
        assert all(bits & Tier.SSD.bit for bits in cache.match(namespace, keys).residency)

    def test_flush_makes_all_durable(self, cache, spec):
        namespace, _, keys = store_chain(cache, spec, 2)
        cache.flush(20_000)
        assert all(bits & Tier.SSD.bit for bits in cache.match(namespace, keys).residency)


class TestReading:
    def test_in_place_has_the_bytes(self, cache, spec):
        namespace, layout, keys = store_chain(cache, spec, 3)
        lease = cache.grant_lease("read", 30_000)
        fetched = cache.fetch(namespace, keys, Target.IN_PLACE, lease_id=lease, wait_ms=10_000)
        assert fetched.outcomes == (Outcome.HIT,) * 3
        for key, place in zip(keys, fetched.places, strict=True):
            assert place.codec is Codec.RAW
            assert read_place(cache, place, layout) == payload(layout, key)
        assert cache.release(lease, namespace, keys) == 3
        cache.release(lease)

    @pytest.mark.parametrize("target", [Target.DEVICE, Target.HOST, Target.BUFFER])
    def test_every_target_has_the_bytes(self, cache, spec, target):
        namespace, layout, keys = store_chain(cache, spec, 2)
        lease = cache.grant_lease("read", 30_000)
        fetched = cache.fetch(namespace, keys, target, lease_id=lease)
        if fetched.job_id:
            fetched = cache.wait_job(fetched.job_id, 10_000)
        assert fetched.outcomes == (Outcome.HIT,) * 2
        assert {place.area.name for place in fetched.places} == {target.name}
        for key, place in zip(keys, fetched.places, strict=True):
            assert read_place(cache, place, layout) == payload(layout, key)
        cache.release(lease)

    def test_a_layer_range_begins_at_its_layer(self, cache, spec):
        namespace, layout, keys = store_chain(cache, spec, 1)
        lease = cache.grant_lease("read", 30_000)
        for target in (Target.IN_PLACE, Target.BUFFER):
            fetched = cache.fetch(namespace, keys, target, lease_id=lease, layers=(1, 3), wait_ms=10_000)
            got = read_place(cache, fetched.places[0], layout, layers=2)
            assert got == payload(layout, keys[0])[layout.slice_bytes :]
        cache.release(lease)

    @pytest.mark.parametrize("layers", [(2, 2), (2, 1), (0, 4), (3, 4)])
    def test_a_wrong_layer_range_is_refused(self, cache, spec, layers):
        namespace, _, keys = store_chain(cache, spec, 1)
        lease = cache.grant_lease("read", 30_000)
        with pytest.raises(InvalidArgument) as caught:
            cache.fetch(namespace, keys, Target.IN_PLACE, lease_id=lease, layers=layers)
        assert caught.value.field in ("layer_begin", "layer_end")
        cache.release(lease)

    def test_a_missing_key_says_why(self, any_cache, spec):
        opened = any_cache.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 1)
        found = any_cache.match(opened.namespace_id, keys)
        assert (found.matched, found.reason) == (0, Reason.NEVER_STORED)

    def test_unknown_lease_job_and_reservation(self, any_cache, spec):
        namespace = any_cache.open_namespace(spec).namespace_id
        keys, _ = chain(namespace, 1)
        with pytest.raises(UnknownLease):
            any_cache.fetch(namespace, keys, Target.IN_PLACE, lease_id=LeaseId(12345))
        with pytest.raises(UnknownLease):
            any_cache.renew_lease(LeaseId(12345))
        with pytest.raises(UnknownJob):
            any_cache.wait_job(JobId(12345), 0)
        with pytest.raises(UnknownReservation):
            any_cache.commit(namespace, [CommitEntry(ReservationId(12345), keys[0], bytes(32))])
        assert any_cache.abort([ReservationId(12345)]) == 0


class TestKeeping:
    def test_a_pinned_block_is_not_removed(self, cache, spec):
        namespace, _, keys = store_chain(cache, spec, 2)
        lease = cache.grant_lease("pin", 30_000)
        cache.fetch(namespace, keys[:1], Target.IN_PLACE, lease_id=lease, wait_ms=10_000)
        assert cache.remove(namespace, keys) == (Outcome.BUSY, Outcome.HIT)
        cache.release(lease)
        assert cache.remove(namespace, keys) == (Outcome.HIT, Outcome.MISS)

    def test_hold_and_renew(self, any_cache, writer, spec):
        namespace, _, keys = store_chain(writer if is_remote(any_cache) else any_cache, spec, 1)
        any_cache.open_namespace(spec)
        lease = any_cache.grant_lease("hold", 30_000)
        assert any_cache.hold(lease, namespace, [keys[0], bytes([9]) * 32]) == (True, False)
        any_cache.renew_lease(lease)
        assert any_cache.remove(namespace, keys) == (Outcome.BUSY,)
        assert any_cache.release(lease) >= 1
        assert any_cache.remove(namespace, keys) == (Outcome.HIT,)

    def test_prefetch_promotes(self, cache, spec):
        namespace, _, keys = store_chain(cache, spec, 2)
        started = cache.prefetch(namespace, keys, Tier.DEVICE)
        if started.job_id:
            cache.wait_job(started.job_id, 10_000)
        assert all(bits & Tier.DEVICE.bit for bits in cache.match(namespace, keys).residency)

    def test_empty_lists_are_answered_empty(self, cache, spec):
        namespace = cache.open_namespace(spec).namespace_id
        lease = cache.grant_lease("none", 30_000)
        assert cache.match(namespace, []).matched == 0
        assert cache.fetch(namespace, [], Target.IN_PLACE, lease_id=lease).outcomes == ()
        assert cache.remove(namespace, []) == ()
        assert cache.hold(lease, namespace, []) == ()


def is_remote(cache):
    return isinstance(cache, Client) and cache.remote


@pytest.mark.parametrize("kind", ["socket", "grpc", "remote"])
class TestWholePayloads:
    def test_put_and_get(self, kind, request, spec):
        cache = make_cache(kind, request)
        opened = cache.open_namespace(spec)
        keys, tokens = chain(opened.namespace_id, 5)
        stored = cache.put(opened.namespace_id, blocks_of(opened.layout, keys, token_ids=tokens))
        assert stored.outcomes == (Outcome.HIT,) * 5
        assert stored.existed == (False,) * 5
        again = cache.put(opened.namespace_id, blocks_of(opened.layout, keys))
        assert (again.outcomes, again.existed) == ((Outcome.HIT,) * 5, (True,) * 5)
        got = cache.get(opened.namespace_id, [*keys, bytes([3]) * 32])
        assert got.outcomes == (*(Outcome.HIT,) * 5, Outcome.MISS)
        assert got.reasons[5] is Reason.NEVER_STORED
        assert [bytes(part) for part in got.payloads[:5]] == [payload(opened.layout, key) for key in keys]
        assert got.payloads[5] is None
        cache.close()

    def test_int8_with_layers_that_stay_raw(self, kind, request):
        cache = make_cache(kind, request)
        spec = small_spec(salt=f"mixed {next(_salts)}".encode(), codec="int8", raw_layers=(1,))
        opened = cache.open_namespace(spec)
        layout, geometry = BlockLayout.of(spec), spec.geometry
        keys, _ = chain(opened.namespace_id, 3)
        rng = np.random.default_rng(5)
        values = [rng.standard_normal((3, layout.raw_slice_bytes // 2)).astype(np.float16) for _ in keys]
        values[2][0, 3] = np.inf
        blocks = PutBlocks(keys, parents_of(keys), [one.tobytes() for one in values])
        assert cache.put(opened.namespace_id, blocks).outcomes == (Outcome.HIT,) * 3
        got = cache.get(opened.namespace_id, keys)
        assert got.codecs == (Codec.INT8, Codec.INT8, Codec.RAW)
        assert bytes(got.payloads[2]) == values[2].tobytes()
        for payload_, one in zip(got.payloads[:2], values, strict=False):
            raw = bytearray(layout.units_bytes(Codec.RAW))
            decode_block(payload_, memoryview(raw), layout, geometry)
            slices = [raw[at : at + layout.raw_slice_bytes] for at in range(0, len(raw), layout.raw_slice_stride)]
            assert slices[1] == one[1].tobytes()
            for layer in (0, 2):
                np.testing.assert_allclose(np.frombuffer(slices[layer], np.float16), one[layer], atol=0.05)
        if kind != "remote":
            with cache.get_in_place(opened.namespace_id, keys) as (view, _, raw_view):
                assert bytes(view.slice(1)) == values[0][1].tobytes()
                assert bytes(view.slice(2)) == bytes(got.payloads[0][-layout.slice_stride :])
                assert bytes(raw_view.slice(0)) == values[2][0].tobytes()
        cache.close()

    def test_wrong_tokens_leave_no_reservation(self, kind, request, spec):
        cache = make_cache(kind, request)
        opened = cache.open_namespace(spec)
        keys, tokens = chain(opened.namespace_id, 3)
        with pytest.raises(InvalidArgument):
            cache.put(opened.namespace_id, blocks_of(opened.layout, keys, token_ids=[t + 1 for t in tokens]))
        again = cache.put(opened.namespace_id, blocks_of(opened.layout, keys, token_ids=tokens))
        assert (again.outcomes, again.existed) == ((Outcome.HIT,) * 3, (False,) * 3)
        cache.close()

    def test_a_payload_of_the_wrong_size_is_refused(self, kind, request, spec):
        cache = make_cache(kind, request)
        opened = cache.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 2)
        blocks = blocks_of(opened.layout, keys)
        short = type(blocks)(blocks.keys, blocks.parents, [blocks.payloads[0], b"short"])
        with pytest.raises(InvalidArgument) as caught:
            cache.put(opened.namespace_id, short)
        assert (caught.value.field, caught.value.value) == ("payloads[1]", "5 bytes")
        assert cache.match(opened.namespace_id, keys).matched == 0
        cache.close()
