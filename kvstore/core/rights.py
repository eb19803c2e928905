"""What a caller may do with a namespace: asked when it opens one."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from kvstore.core.namespace import NamespaceSpec


class Right(IntEnum):
    """Each includes the ones below it."""

    NONE = 0
    READ = 1
    WRITE = 2


Rights = Callable[[NamespaceSpec], Right]
"""The right of one caller to the namespace of a spec."""
