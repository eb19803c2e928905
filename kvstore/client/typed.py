"""The border of the client: what an argument of the wrong type does deep inside comes out as InvalidArgument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar, cast

from kvstore.core.errors import InvalidArgument

P = ParamSpec("P")
R = TypeVar("R")

FOREIGN: Final = (TypeError, ValueError, AttributeError, LookupError, OverflowError)


def typed(method: Callable[P, R]) -> Callable[P, R]:
    """A public call, blocking or asyncio, out of which no foreign error comes: its cause is the one that was raised."""
    name = method.__name__
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def awaited(*arguments: Any, **more: Any) -> Any:
            try:
                return await method(*arguments, **more)
            except FOREIGN as error:
                raise _invalid(name, error) from error

        return cast(Callable[P, R], awaited)

    @wraps(method)
    def called(*arguments: P.args, **more: P.kwargs) -> R:
        try:
            return method(*arguments, **more)
        except FOREIGN as error:
            raise _invalid(name, error) from error

    return called


def _invalid(name: str, error: Exception) -> InvalidArgument:
    what = f"{type(error).__name__}: {str(error)[:200]}"
    return InvalidArgument(f"arguments of {name}", what, "values of the types that it documents")
