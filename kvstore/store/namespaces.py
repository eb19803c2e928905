"""The namespaces that are known: specs, layouts, policies and names. Guarded by the store's lock."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.cache import NearNamespace
from kvstore.core.errors import InvalidArgument, NamespaceMismatch, ResourceExhausted, UnknownNamespace
from kvstore.core.namespace import PAGE_BYTES, BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import Codec, NamespaceId, Tier
from kvstore.kernels.layout import align_up

NAME_BYTES_MAX = 256


@dataclass(slots=True)
class Namespace:
    """One namespace; ``number`` is its entry in the index's column. Spec and layout never change."""

    number: int
    namespace_id: NamespaceId
    spec: NamespaceSpec
    layout: BlockLayout
    policy: NamespacePolicy
    name: str = ""
    on_disk: bool = False
    blocks: int = 0
    blocks_by_tier: list[int] = field(default_factory=lambda: [0] * 4)
    saved_bytes: int = 0
    """Bytes that the codecs of its copies save, over all tiers."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Bytes of one block by tier and ``kind_of`` its codecs; the entry of tier 0 is unused."""

    def __post_init__(self) -> None:
        raw, coded = self.layout.device_bytes, align_up(self.layout.units_bytes(Codec.INT8), PAGE_BYTES)
        stored = (self.layout.raw_stored_bytes, self.layout.stored_bytes) * 2
        self.sizes = ((0,) * 4, (raw, raw, coded, coded), stored, stored)

    @property
    def codec(self) -> Codec:
        """Codec of blocks below DEVICE, where the policy does not keep them raw."""
        return Codec[self.spec.codec.upper()]

    def codec_at(self, depth: int) -> Codec:
        """Codec of a block with ``depth`` blocks before it: raw if it lies wholly in the first raw tokens."""
        tokens = self.spec.block_tokens
        raw = (depth + 1) * tokens <= self.policy.raw_first_tokens
        return Codec.RAW if raw else self.codec

    def device_codec_of(self, codec: Codec) -> Codec:
        """Codec on DEVICE, as the policy is now, of a block with this codec below."""
        return codec if self.policy.device_codec == "int8" else Codec.RAW

    def bytes_in(self, tier: Tier, codec: Codec, device_codec: Codec = Codec.RAW) -> int:
        """Bytes of one block in a tier."""
        return self.sizes[tier][kind_of(codec, device_codec)]


def kind_of(codec: Codec, device_codec: Codec) -> int:
    """One number for the codec of a block below DEVICE and the one of its copy there."""
    return codec | device_codec << 1


class NamespaceTable:
    """Namespaces by id, name and number."""

    def __init__(self, namespaces_max: int) -> None:
        self._max = namespaces_max
        self._by_id: dict[NamespaceId, Namespace] = {}
        self._by_name: dict[str, Namespace] = {}
        self.entries: list[Namespace] = []

    def __len__(self) -> int:
        return len(self.entries)

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

    def check(self, spec: NamespaceSpec, name: str, policy: NamespacePolicy | None) -> None:
        """Raise what ``open`` would raise; change nothing."""
        if len(name.encode()) > NAME_BYTES_MAX:
            raise InvalidArgument("name", f"{len(name.encode())} bytes", f"at most {NAME_BYTES_MAX} bytes")
        if policy is not None:
            check_policy(spec, policy)
        bound = self._by_name.get(name) if name else None
        if bound is not None and bound.spec != spec:
            differing = ", ".join(bound.spec.differing_fields(spec))
            raise NamespaceMismatch(
                f"name {name!r} is bound to a spec that differs in {differing}: bound {bound.spec}, given {spec}",
                field=differing,
                value=name,
                expected=f"the spec of {bound.namespace_id.hex()}",
            )
        if spec.namespace_id not in self._by_id and len(self.entries) >= self._max:
            raise ResourceExhausted(f"{self._max} namespaces are known; the bound is store.namespaces_max")

    def open(self, spec: NamespaceSpec, name: str, policy: NamespacePolicy | None) -> tuple[Namespace, bool]:
        """The namespace of a spec and whether it is new. The policy of an opener that gives one stays."""
        self.check(spec, name, policy)
        namespace_id = spec.namespace_id
        found = self._by_id.get(namespace_id)
        created = found is None
        if found is None:
            found = Namespace(len(self.entries), namespace_id, spec, BlockLayout.of(spec), policy or NamespacePolicy())
            self._by_id[namespace_id] = found
            self.entries.append(found)
        elif policy is not None and policy != found.policy:
            found.policy = policy
            found.on_disk = False
        if name:
            self._by_name[name] = found
            if not found.name:
                found.name, found.on_disk = name, False
        return found, created

    def near(self, spec: NamespaceSpec) -> tuple[NearNamespace, ...]:
        """Other namespaces of the same model, fullest first, with the fields that differ."""
        others = [e for e in self.entries if e.spec.model == spec.model and e.spec != spec]
        others.sort(key=lambda e: -e.blocks)
        return tuple(NearNamespace(e.namespace_id, spec.differing_fields(e.spec), e.blocks) for e in others[:16])


def check_policy(spec: NamespaceSpec, policy: NamespacePolicy) -> None:
    """Refuse what does not fit the spec."""
    if policy.device_codec not in ("raw", spec.codec):
        raise InvalidArgument("policy.device_codec", repr(policy.device_codec), f"raw, or the spec's {spec.codec}")
