"""Worlds for the store's tests: a small store over a disk in memory, everything closed at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.kernels import native
from kvstore.store.columns import forms
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import World

BOTH_FORMS = (
    "test_get",
    "test_leases",
    "test_rights",
    "test_room",
    "test_recency",
    "test_mixed",
    "test_sections",
    "test_guarantees",
)
"""Files that run over each form of the index; all others over the one that the machine has, or, with the environment
variable KVSTORE_TEST_INDEX, over that one."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    named, file = os.environ.get("KVSTORE_TEST_INDEX"), metafunc.module.__name__.rpartition(".")[2]
    if file == "test_index_forms":
        return
    if named is not None:
        metafunc.parametrize("index_form", [named], indirect=True)
    elif file in BOTH_FORMS and native.available():
        metafunc.parametrize("index_form", ["native", "python"], indirect=True)


@pytest.fixture(autouse=True)
def index_form(request: pytest.FixtureRequest) -> Iterator[str | None]:
    named = getattr(request, "param", None)
    if named is None:
        yield None
        return
    with forms.only(named):
        yield named


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
