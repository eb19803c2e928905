"""Namespaces are made known to a session; what the disk holds blocks of, it also knows by its present policy."""

from __future__ import annotations

import logging

from kvstore.cache import OpenedNamespace
from kvstore.core.errors import InvalidArgument, TierError
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import Durability, Tier
from kvstore.store.tables.namespaces import check_name
from kvstore.store.tables.owners import Owner
from kvstore.store.tables.state import State

log = logging.getLogger(__name__)


class Opening:
    """The verb ``open_namespace``."""

    def __init__(self, state: State) -> None:
        self._state = state

    def open(self, owner: Owner, spec: NamespaceSpec, name: str, policy: NamespacePolicy | None) -> OpenedNamespace:
        """See ``Cache.open_namespace``."""
        state = self._state
        check_name(name)
        if policy is not None and policy.durability is Durability.DURABLE and state.disk is None:
            raise InvalidArgument("policy.durability", "DURABLE", "MEMORY, since this store has no SSD tier")
        with state.locked() as book:
            owner.require_open()
            weight = state.namespaces.weight_of(spec, name, opened=spec.namespace_id in owner.namespaces)
            if weight:
                state.owners.require_share("namespaces", owner.peer, state.config, more=weight)
            namespace, created = state.namespaces.open(spec, name, policy)
            book.index.name(namespace.number, namespace.namespace_id)
            if namespace.namespace_id not in owner.namespaces:
                owner.namespaces[namespace.namespace_id] = namespace
                state.namespaces.use(namespace)
            state.owners.charge_namespaces(owner, weight)
            near = state.namespaces.near(spec, owner.namespaces)
            # Without a block on SSD it is kept there before the first one is written, if ever one is.
            keep = not namespace.on_disk and namespace.blocks_by_tier[Tier.SSD] > 0
        if keep and state.disk is not None:
            try:
                state.disk.put_namespace(spec, namespace.policy, namespace.name)
                with state.locked():
                    namespace.on_disk = True
            except TierError as error:
                # It is tried again before the first block of the namespace is written.
                log.warning("namespace %s is not on disk yet: %s", namespace.namespace_id.hex(), error)
        storage = sum(tier.capacity_bytes for tier in state.storages.values())
        return OpenedNamespace(namespace.namespace_id, namespace.layout, created, near, storage)
