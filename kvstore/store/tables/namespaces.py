"""The namespaces that are known: specs, layouts, policies and names. Guarded by the store's lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Final

from kvstore.cache import NearNamespace
from kvstore.core.errors import InternalError, InvalidArgument, NamespaceMismatch, ResourceExhausted, UnknownNamespace
from kvstore.core.namespace import PAGE_BYTES, BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import TIERS_MAX, Codec, NamespaceId, Tier
from kvstore.kernels.codecs import row_of
from kvstore.kernels.layout import align_up
from kvstore.store.columns.steps import Forms
from kvstore.store.guarantees import Share

NAME_BYTES_MAX: Final = 256
NEAR_LOOKED_AT_MAX: Final = 16
NEAR_TOLD_MAX: Final = 4
TEXT_BYTES_EACH: Final = 1024
"""Bytes of text in a spec that weigh as much as a namespace does."""


@dataclass(slots=True)
class Namespace:
    """One namespace; ``number`` is its entry in the index's column. Spec and layout never change."""

    number: int
    namespace_id: NamespaceId
    spec: NamespaceSpec
    layout: BlockLayout
    policy: NamespacePolicy
    names: tuple[str, ...] = ()
    on_disk: bool = False
    """Whether SSD knows spec, policy and name as they are now. It may forget a namespace that has no block there."""
    sessions: int = 0
    """Open sessions that opened it."""
    slots: int = 0
    """Slots of the index that are its blocks' and ghosts'."""
    blocks: int = 0
    blocks_by_tier: list[int] = field(default_factory=lambda: [0] * (TIERS_MAX + 1))
    saved_bytes: int = 0
    """Bytes that the codecs of its copies save, over all tiers."""
    brought: int = 0
    """Blocks that clients brought and that were new."""
    evicted: int = 0
    """Copies that were dropped for space, over all tiers."""
    codec: Codec = Codec.RAW
    """Codec of blocks below DEVICE, where the policy does not keep them raw: the spec's."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Bytes of one block by tier and ``kind_of`` its codecs; the entry of tier 0 is unused."""
    share: Share | None = None
    """What its tenant was promised; None for nothing."""
    forms: dict[int, Forms] = field(default_factory=dict)
    """What ``places.forms_of`` has computed, by first layer."""

    def __post_init__(self) -> None:
        self.codec = Codec.of_word(self.spec.codec)
        self.layout, self.sizes = _shared(self.layout)

    @property
    def name(self) -> str:
        """The first name that it was given, or ""."""
        return self.names[0] if self.names else ""

    def codec_at(self, depth: int) -> Codec:
        """Codec of a block with ``depth`` blocks before it: raw if it lies wholly in the first raw tokens."""
        tokens = self.spec.block_tokens
        raw = (depth + 1) * tokens <= self.policy.raw_first_tokens
        return Codec.RAW if raw else self.codec

    def device_codec_of(self, codec: Codec) -> Codec:
        """Codec on DEVICE, as the policy is now, of a block with this codec below."""
        return codec if self.policy.device_codec != "raw" else Codec.RAW

    def bytes_in(self, tier: Tier, codec: Codec, device_codec: Codec = Codec.RAW) -> int:
        """Bytes of one block in a tier."""
        return self.sizes[tier][self.kind_of(codec, device_codec)]

    def kind_of(self, codec: Codec, device_codec: Codec) -> int:
        """One number for the codec of a block below DEVICE and the one of its copy there.

        Each is raw or the namespace's own: a bit. InternalError for any other, which would have no size here.
        """
        own = self.codec
        if (codec is not Codec.RAW and codec is not own) or (device_codec is not Codec.RAW and device_codec is not own):
            raise InternalError(f"codecs {int(codec)} and {int(device_codec)} in a namespace of {own.word}")
        return (codec is not Codec.RAW) | (device_codec is not Codec.RAW) << 1


@lru_cache(maxsize=4096)
def _shared(layout: BlockLayout) -> tuple[BlockLayout, tuple[tuple[int, ...], ...]]:
    """A layout and its sizes by tier and kind, one object for all namespaces of that shape: tenants are many."""
    # The layout is of one codec beside raw: whichever it is, its units have the same bytes.
    raw, coded = layout.device_bytes, align_up(layout.units_bytes(Codec.INT8), PAGE_BYTES)
    stored = (layout.raw_stored_bytes, layout.stored_bytes) * 2
    return layout, ((0,) * 4, (raw, raw, coded, coded), *[stored] * (TIERS_MAX - 1))


class NamespaceTable:
    """Namespaces by id, number, name and model.

    A namespace that nothing needs (no block, no open session that opened it) *rests*: it stays known, under its name
    and policy, until the table is full; then those that have rested longest are forgotten, and their numbers are used
    again. So ``namespaces_max`` bounds what is in use at one time, not what was ever opened.
    """

    def __init__(self, namespaces_max: int, shares: Mapping[str, Share] = MappingProxyType({})) -> None:
        self._max = namespaces_max
        self._shares = shares
        self._by_id: dict[NamespaceId, Namespace] = {}
        self._by_name: dict[str, Namespace] = {}
        self._by_model: dict[str, dict[bytes, dict[int, Namespace]]] = {}
        """By model, then by salt: what one tenant has of one model, by number."""
        self._resting: dict[int, Namespace] = {}
        self._free: list[int] = []
        self.weight = 0
        """One for each namespace and each of its names, and one for each KiB of text in its spec."""
        self.entries: list[Namespace] = []
        """By number; for a slot's namespace only. Numbers of forgotten ones keep what they had until they are used."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_id.values())

    def get(self, namespace_id: NamespaceId) -> Namespace:
        """Raises UnknownNamespace (InvalidArgument for an id of the wrong length)."""
        found = self._by_id.get(namespace_id)
        if found is not None:
            return found
        if len(namespace_id) != 32:
            raise InvalidArgument("namespace_id", f"{len(namespace_id)} bytes", "32 bytes")
        raise UnknownNamespace(
            f"namespace {namespace_id.hex()[:16]} was not opened", field="namespace_id", value=namespace_id.hex()
        )

    def find(self, namespace_id: NamespaceId) -> Namespace | None:
        """The namespace, or None."""
        return self._by_id.get(namespace_id)

    def open(self, spec: NamespaceSpec, name: str, policy: NamespacePolicy | None) -> tuple[Namespace, bool]:
        """The namespace of a spec and whether it is new. The policy of an opener that gives one stays.

        Raises before it changes anything but what rests.
        """
        if policy is not None:
            check_policy(spec, policy)
        bound = self._by_name.get(name) if name else None
        if bound is not None and bound.spec != spec:
            raise _mismatch(name, bound, spec)
        namespace_id = spec.namespace_id
        found = self._by_id.get(namespace_id)
        created = found is None
        more = (_weight_of(spec) if created else 0) + (1 if name and bound is None else 0)
        self._make_room(more, found)
        if found is None:
            found = self._add(namespace_id, spec, policy or NamespacePolicy())
        elif policy is not None and policy != found.policy:
            found.policy = policy
            found.on_disk = False
        self.weight += more
        if name and bound is None:
            self._by_name[name] = found
            found.names += (name,)
            found.on_disk = found.on_disk and len(found.names) > 1
        return found, created

    def weight_of(self, spec: NamespaceSpec, name: str, *, opened: bool) -> int:
        """What opening adds to the bound of a peer: the namespace, unless it has it ``opened``, and a new name."""
        return (0 if opened else _weight_of(spec)) + (1 if name and name not in self._by_name else 0)

    def _add(self, namespace_id: NamespaceId, spec: NamespaceSpec, policy: NamespacePolicy) -> Namespace:
        number = self._free.pop() if self._free else len(self.entries)
        added = Namespace(number, namespace_id, spec, BlockLayout.of(spec), policy)
        added.share = self._shares.get(spec.tenant)
        if number == len(self.entries):
            self.entries.append(added)
        else:
            self.entries[number] = added
        self._by_id[namespace_id] = added
        self._by_model.setdefault(spec.model, {}).setdefault(spec.salt, {})[number] = added
        return added

    def use(self, namespace: Namespace) -> None:
        """One session more needs it."""
        namespace.sessions += 1
        self._resting.pop(namespace.number, None)

    def leave(self, namespace: Namespace) -> None:
        """Undo one ``use``."""
        namespace.sessions -= 1
        self.rest(namespace)

    def rest(self, namespace: Namespace) -> None:
        """Let it be forgotten when its place is wanted, if neither a session nor a slot of the index needs it."""
        if namespace.sessions == 0 and namespace.slots == 0 and namespace.number not in self._resting:
            self._resting[namespace.number] = namespace

    def _make_room(self, more: int, wanted: Namespace | None) -> None:
        """Forget what rests, the longest first, until there is room; ``wanted`` stays. Raises ResourceExhausted."""
        while more and self.weight + more > self._max:
            oldest = next((entry for entry in self._resting.values() if entry is not wanted), None)
            if oldest is None:
                raise ResourceExhausted(
                    f"{len(self)} namespaces (of weight {self.weight}) are in use; the bound is store.namespaces_max ="
                    f" {self._max}",
                    field="namespaces",
                )
            self._forget(oldest)

    def _forget(self, namespace: Namespace) -> None:
        spec, number = namespace.spec, namespace.number
        if self._resting.pop(number, None) is None or namespace.slots or namespace.sessions:
            return
        del self._by_id[namespace.namespace_id]
        for name in namespace.names:
            del self._by_name[name]
        tenants = self._by_model[spec.model]
        del tenants[spec.salt][number]
        if not tenants[spec.salt]:
            del tenants[spec.salt]
        if not tenants:
            del self._by_model[spec.model]
        self.weight -= _weight_of(spec) + len(namespace.names)
        self._free.append(number)

    def near(self, spec: NamespaceSpec, opened: dict[NamespaceId, Namespace]) -> tuple[NearNamespace, ...]:
        """The fullest few other namespaces of the same model, with the fields that differ.

        Only those of the same salt and those that the asker has ``opened`` itself, and a bounded number of them: all
        others are other tenants', whose ids and fields are nobody else's business.
        """
        mine = islice(self._by_model.get(spec.model, {}).get(spec.salt, {}).values(), NEAR_LOOKED_AT_MAX)
        own = (e for e in islice(reversed(opened.values()), NEAR_LOOKED_AT_MAX) if e.spec.model == spec.model)
        found = {entry.number: entry for entry in (*mine, *own)}
        others = [entry for entry in found.values() if entry.spec != spec]
        others.sort(key=lambda entry: -entry.blocks)
        return tuple(
            NearNamespace(entry.namespace_id, spec.differing_fields(entry.spec), entry.blocks)
            for entry in others[:NEAR_TOLD_MAX]
        )

    def of_model(self, model: str) -> list[Namespace]:
        """A bounded number of the namespaces of a model, of all tenants: for operators."""
        tenants = self._by_model.get(model, {}).values()
        return list(islice((entry for tenant in tenants for entry in tenant.values()), NEAR_LOOKED_AT_MAX))


def _mismatch(name: str, bound: Namespace, spec: NamespaceSpec) -> NamespaceMismatch:
    """What the opener of another spec is told; of another tenant's nothing but that it is another's."""
    differing = bound.spec.differing_fields(spec)
    mine = "salt" not in differing
    fields = ", ".join(differing) if mine else "salt"
    specs = f": bound {bound.spec}, given {spec}" if mine else ""
    return NamespaceMismatch(
        f"name {name!r} is bound to a spec that differs in {fields}{specs}",
        field=fields,
        value=name,
        expected=f"the spec of {bound.namespace_id.hex()}" if mine else "a name that no other tenant has taken",
    )


def _weight_of(spec: NamespaceSpec) -> int:
    """Share of ``namespaces_max`` that a namespace takes, without its names."""
    text = sum(map(len, (spec.model, spec.revision, spec.rope, spec.extra, spec.salt)))
    return 1 + text // TEXT_BYTES_EACH


def check_name(name: str) -> None:
    """Refuse a name that is too long."""
    if len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidArgument("name", f"{len(name.encode())} bytes", f"at most {NAME_BYTES_MAX} bytes")


def check_policy(spec: NamespaceSpec, policy: NamespacePolicy) -> None:
    """Refuse what does not fit the spec."""
    if policy.device_codec not in ("raw", spec.codec) or not row_of(policy.device_codec).kernel:
        raise InvalidArgument("policy.device_codec", repr(policy.device_codec), f"raw, or the spec's {spec.codec}")
