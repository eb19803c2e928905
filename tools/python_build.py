"""How this Python was built, which figures depend on: without profile-guided optimisation calls take up to 1.6 times as
long."""

from __future__ import annotations

import platform
import sysconfig


def optimised() -> bool:
    """Whether it was configured with ``--enable-optimizations``, as distributions' builds are and pyenv's is not."""
    return "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")


def told() -> str:
    """Release and build, in words."""
    return f"Python {platform.python_version()}{'' if optimised() else ' built without --enable-optimizations'}"
