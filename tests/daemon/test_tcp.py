"""The TCP port beyond loopback: TLS of either kind, bearer tokens, roles, and a policy that is read again."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from kvstore.client import AsyncClient, Client, ClientOptions, Credentials
from kvstore.core.errors import (
    InvalidArgument,
    KVStoreError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    UnknownNamespace,
)
from kvstore.daemon.config import Config
from kvstore.daemon.plan import make_plan
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.v1 import admin_pb2
from tests.client.harness import blocks_of, chain, daemon_thread, small_spec, until
from tests.rpc.test_rights import NAMED

TENANT = small_spec(salt=b"team-a")
ENTRY = """
[[allow]]
name = "{token}"
token_sha256 = ["{digest}"]
namespaces = ["{namespaces}"]
roles = ["{role}"]
"""


def policy(*entries: tuple[str, str, str]) -> str:
    """Entries of (token, namespaces, role)."""
    return "".join(
        ENTRY.format(token=t, digest=hashlib.sha256(t.encode()).hexdigest(), namespaces=n, role=r)
        for t, n, r in entries
    )


ENTRIES = (("writer", "team-a/*", "data-write"), ("reader", "team-a/*", "data-read"), ("boss", "*/*", "admin"))


@dataclass(frozen=True)
class Place:
    """Files of one daemon, and its authority."""

    folder: Path
    authority: trustme.CA

    def config(self, **more: object) -> Config:
        more.setdefault("socket", self.folder / "s")
        return Config(
            device="0", host="8 MiB", listen="0.0.0.0:0", tls_cert=self.folder / "cert",
            tls_key=self.folder / "key", **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def options(self, token: str = "", **more: object) -> ClientOptions:
        credentials = Credentials(token=token, ca=self.authority.cert_pem.bytes(), **more)  # type: ignore[arg-type]
        return ClientOptions(strict=True, connect_timeout_s=20, timeout_s=20, credentials=credentials)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder, authority = tmp_path_factory.mktemp("tcp"), trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    (folder / "cert").write_bytes(made.cert_chain_pems[0].bytes())
    (folder / "key").write_bytes(made.private_key_pem.bytes())
    (folder / "ca").write_bytes(authority.cert_pem.bytes())
    (folder / "policy").write_text(policy(*ENTRIES))
    (folder / "policy").chmod(0o600)
    return Place(folder, authority)


@pytest.fixture(scope="module")
def target(place: Place) -> Iterator[str]:
    with daemon_thread(place.config(policy=place.folder / "policy")) as daemon:
        yield f"grpc://localhost:{daemon.grpc_port}"


def test_a_writer_writes_and_a_reader_reads_what_is_its_tenant_s(place: Place, target: str) -> None:
    with Client(target, place.options("writer")) as writer, Client(target, place.options("reader")) as reader:
        opened = writer.open_namespace(TENANT)
        keys, tokens = chain(opened.namespace_id, 2)
        blocks = blocks_of(opened.layout, keys, token_ids=tokens)
        writer.put(opened.namespace_id, blocks)
        reader.open_namespace(TENANT)
        assert reader.match(opened.namespace_id, keys).matched == 2
        assert [bytes(p) for p in reader.get(opened.namespace_id, keys).payloads] == [bytes(p) for p in blocks.payloads]
        for call in (
            lambda: reader.put(opened.namespace_id, blocks_of(opened.layout, chain(opened.namespace_id, 1, seed=2)[0])),
            lambda: reader.remove(opened.namespace_id, keys),
        ):
            with pytest.raises(PermissionDenied, match="not write"):
                call()
        assert writer.match(opened.namespace_id, keys).matched == 2


@pytest.mark.parametrize("spec", [small_spec(salt=b"team-b"), small_spec()])
@pytest.mark.parametrize("token", ["writer", "reader", "boss"])
def test_no_token_opens_a_namespace_that_its_patterns_do_not_fit(
    place: Place, target: str, token: str, spec: object
) -> None:
    with Client(target, place.options(token)) as client, pytest.raises(PermissionDenied) as caught:
        client.open_namespace(spec)  # type: ignore[arg-type]
    assert "team-a" not in str(caught.value)


def test_admin_rights_come_with_the_role_and_no_other(place: Place, target: str) -> None:
    with Client(target, place.options("boss")) as client:
        reply = client.connection()[0].call("kvstore.v1.Admin/Status", b"", 10)
        assert admin_pb2.StatusResponse.FromString(reply).pid == os.getpid()
    with Client(target, place.options("writer")) as client, pytest.raises(PermissionDenied, match="needs admin rights"):
        client.connection()[0].call("kvstore.v1.Admin/Status", b"", 10)


@pytest.mark.parametrize("token", ["", "nobody"])
def test_without_a_token_that_is_known_there_is_no_session(place: Place, target: str, token: str) -> None:
    with pytest.raises(Unauthenticated, match="bearer token"):
        Client(target, place.options(token)).connection()


def test_nor_on_the_unix_socket_of_grpc(place: Place, target: str) -> None:
    with pytest.raises(Unauthenticated, match="bearer token"):
        Client(f"grpc://unix:{place.folder / 's'}.grpc", ClientOptions(strict=True)).connection()


def test_plain_text_and_a_stranger_s_authority_reach_nothing(place: Place, target: str) -> None:
    plain = ClientOptions(strict=True, connect_timeout_s=3, timeout_s=3)
    other = Credentials(token="writer", ca=trustme.CA().cert_pem.bytes())
    for options in (plain, ClientOptions(strict=True, connect_timeout_s=3, timeout_s=3, credentials=other)):
        with pytest.raises(KVStoreError) as caught:
            Client(target, options).connection()
        assert isinstance(caught.value, Unavailable | KVStoreError)
        assert not isinstance(caught.value, Unauthenticated)


async def asked(target: str, options: ClientOptions) -> int:
    async with AsyncClient(target, options) as client:
        opened = await client.open_namespace(TENANT)
        return (await client.match(opened.namespace_id, chain(opened.namespace_id, 1)[0])).matched


def test_the_async_client_has_the_same_credentials(place: Place, target: str) -> None:
    import asyncio  # noqa: PLC0415

    assert asyncio.run(asked(target, place.options("reader"))) in (0, 1)


def test_mutual_tls_asks_for_a_certificate(place: Place) -> None:
    mine = place.authority.issue_cert("client")
    shown = {"cert": mine.cert_chain_pems[0].bytes(), "key": mine.private_key_pem.bytes()}
    with daemon_thread(place.config(socket=place.folder / "mutual", tls_client_ca=place.folder / "ca")) as daemon:
        target = f"grpc://localhost:{daemon.grpc_port}"
        with Client(target, place.options(**shown)) as client:
            assert client.open_namespace(TENANT).namespace_id == TENANT.namespace_id
        with pytest.raises(KVStoreError):
            Client(target, ClientOptions(strict=True, connect_timeout_s=3, timeout_s=3,
                                         credentials=place.options().credentials)).connection()  # fmt: skip


def test_sighup_reads_the_policy_again_and_ends_who_lost_rights(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "policy"
    file.write_text(policy(*ENTRIES))
    file.chmod(0o600)
    settings = {"device": "0", "host": "8 MiB", "ssd": "0", "listen": "127.0.0.1:0", "policy": str(file)}
    with DaemonProcess(tmp_path, settings) as daemon:
        daemon.start()
        target = f"grpc://127.0.0.1:{daemon.tcp_port}"
        options = ClientOptions(strict=True, credentials=Credentials(token="writer", tls=False))
        with Client(target, options) as client:
            client.open_namespace(TENANT)
            file.write_text(policy(("reader", "team-a/*", "data-read")))
            os.kill(daemon.pid, signal.SIGHUP)

            def refused() -> bool:
                try:
                    client.open_namespace(TENANT)
                except Unauthenticated:
                    return True
                return False

            until(refused)


@pytest.mark.parametrize(
    "values",
    [
        {"listen": "0.0.0.0:7070"},
        {"listen": "0.0.0.0:7070", "tls_cert": "c", "tls_key": "k"},
        {"listen": "0.0.0.0:7070", "policy": "p"},
        {"listen": "host:7070", "policy": "p", "tls_cert": "c"},
        {"tls_client_ca": "a"},
        {"listen": "7070"},
    ],
)
def test_what_would_let_anybody_in_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        Config(**values)  # type: ignore[arg-type]


def test_check_says_what_a_start_would_of_policy_and_certificate(place: Place, tmp_path: Path) -> None:
    good = place.config(policy=place.folder / "policy")
    lines = {finding.subject: finding for finding in make_plan(good)}
    assert (lines["policy"].state, lines["tls"].state) == ("ok", "ok")
    assert "3 tokens, 0 users" in lines["policy"].text
    (tmp_path / "policy").write_text("nonsense")
    other = place.authority.issue_cert("other").private_key_pem.bytes()
    (tmp_path / "key").write_bytes(other)
    wrong = good.model_copy(update={"policy": tmp_path / "policy", "tls_key": tmp_path / "key"})
    lines = {finding.subject: finding for finding in make_plan(wrong)}
    assert (lines["policy"].state, lines["tls"].state) == ("error", "error")
    assert "the key of" in lines["tls"].text
    insecure = Config(listen="0.0.0.0:7070", insecure_tcp=True)  # type: ignore[call-arg]
    assert [f.state for f in make_plan(insecure) if f.subject == "tls"] == ["warning"]


@pytest.mark.parametrize("name", NAMED)
def test_over_tcp_another_tenant_s_namespace_is_unknown_to_every_call(place: Place, target: str, name: str) -> None:
    """Its id and its keys are known here, and help nothing: neither does an operator's token."""
    with Client(target, place.options("writer")) as owner, Client(target, place.options("boss")) as other:
        theirs = owner.open_namespace(TENANT).namespace_id
        request = type(NAMED[name])()
        request.CopyFrom(NAMED[name])
        request.namespace_id = theirs
        connection = other.connection()[0]
        if "lease_id" in request.DESCRIPTOR.fields_by_name:
            request.lease_id = other.grant_lease("x", 1000)
        payload = request.SerializeToString()
        with pytest.raises(UnknownNamespace) as caught:
            list(connection.stream(name, payload, 10) if name.endswith("/Read") else connection.call(name, payload, 10))
    assert "team-a" not in str(caught.value)


def test_insecure_tcp_is_ones_own_word() -> None:
    assert Config(listen="0.0.0.0:7070", insecure_tcp=True).listen == "0.0.0.0:7070"  # type: ignore[call-arg]
    assert Config(listen="[::]:7070", tls_cert="c", tls_key="k", policy="p").listen  # type: ignore[call-arg,arg-type]


def test_credentials_do_not_show() -> None:
    shown = repr(ClientOptions(credentials=Credentials(token="secret")))
    assert "secret" not in shown
    with pytest.raises(InvalidArgument) as caught:
        Credentials(token="se\ncret")
    assert "cret" not in str(caught.value)
