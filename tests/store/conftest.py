"""Worlds for the store's tests: a small store over a disk in memory, everything closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import World


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**options: Any) -> World:
        worlds.append(World(**options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def world(make_world: Callable[..., World], disk: MemoryDisk) -> World:
    return make_world(disk=disk)
