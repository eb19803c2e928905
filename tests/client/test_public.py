"""The public surface is what ``__all__`` says, and importing it is light."""

from __future__ import annotations

import json
import subprocess
import sys

import kvstore.client
from kvstore.cache import Cache
from kvstore.client import Client, ClientOptions
from kvstore.client.operations import Operations

HEAVY = ("grpc", "numpy", "pydantic", "typer", "torch", "hypothesis")


def loaded_after(code, *arguments):
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted(set(sys.modules) & set({HEAVY!r}))))"
    done = subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_all_is_the_public_surface():
    assert set(kvstore.client.__all__) == set(kvstore.client._HOMES)
    for name in kvstore.client.__all__:
        assert getattr(kvstore.client, name).__doc__ or name == "default_socket"
    public = {name for name in vars(kvstore.client) if not name.startswith("_")}
    modules = {name for name in public if f"kvstore.client.{name}" in sys.modules}
    assert public - modules - {"annotations", "import_module", "TYPE_CHECKING"} <= set(kvstore.client.__all__)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(kvstore.client, "Nothing")


def test_both_clients_have_every_method_of_the_cache():
    methods = {name for name in vars(Cache) if not name.startswith("_")}
    for name in ("Client", "AsyncClient"):
        assert methods <= set(dir(getattr(kvstore.client, name)))
    local = {"memory", "device_tensor", "generation", "close", "versions", "alive", "plan_bell"}
    assert methods - local <= set(dir(Operations))


def test_importing_is_light():
    assert loaded_after("import kvstore.client") == []
    assert loaded_after("from kvstore.client.session_connection import SessionConnection") == []


def test_the_fast_path_never_loads_grpc(daemon):
    code = (
        "import sys\nfrom kvstore.client import Client, ClientOptions\n"
        "with Client(sys.argv[1], ClientOptions(strict=True, buffer_bytes=4096)) as c: c.grant_lease('x', 1000)"
    )
    assert loaded_after(code, str(daemon.socket)) == ["numpy"]


def test_a_client_is_usable_without_memory(daemon):
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
        assert client.grant_lease("x", 1000)
