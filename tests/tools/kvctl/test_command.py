"""Options that all commands take, errors, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvstore import __version__
from kvstore.core import errors
from kvstore.tools.kvctl.exits import BY_STATUS, Exit
from kvstore.tools.kvctl.main import COMMANDS, commands_of
from kvstore.v1 import admin_pb2

ALL = [name for panel in COMMANDS.values() for name in panel]


def every_error(kind=errors.KVStoreError):
    return [kind, *(found for sub in kind.__subclasses__() for found in every_error(sub))]


def test_every_status_has_an_exit_code():
    assert {error.status for error in every_error()} <= set(BY_STATUS)


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_help_with_the_common_options(kvctl, name):
    ran = kvctl(name, "--help")
    assert ran.code == 0
    for option in ("--socket", "--output", "--timeout"):
        assert option in ran.out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument("keys", "31 bytes", "a multiple of 32"), Exit.USAGE),
        (errors.UnknownNamespace("no such namespace"), Exit.NOT_FOUND),
        (errors.PermissionDenied("not for you"), Exit.REFUSED),
        (errors.Unauthenticated("who?"), Exit.REFUSED),
        (errors.NamespaceMismatch("bound"), Exit.REFUSED),
        (errors.ResourceExhausted("too many"), Exit.REFUSED),
        (errors.DeadlineExceeded("too late"), Exit.DEADLINE),
        (errors.Unavailable("gone"), Exit.UNREACHABLE),
        (errors.InternalError("a bug"), Exit.FAILED),
    ],
)
def test_errors_become_a_sentence_on_stderr_and_a_code(kvctl, daemon, error, code):
    daemon.replies["Admin/Status"] = error
    ran = kvctl("status")
    assert (ran.code, ran.out) == (code, "")
    assert ran.err == f"kvctl: {error.message}\n"
    assert daemon.closed == 1


def test_errors_are_json_where_json_was_asked_for(kvctl, daemon):
    daemon.replies["Admin/Status"] = errors.InvalidArgument("keys", "31 bytes", "a multiple of 32")
    ran = kvctl("status", "-o", "json")
    assert ran.out == ""
    assert json.loads(ran.err)["error"] == {
        "reason": "INVALID_ARGUMENT",
        "message": "keys is 31 bytes; expected a multiple of 32",
        "field": "keys",
        "value": "31 bytes",
        "expected": "a multiple of 32",
    }


def test_no_daemon_is_said_with_the_socket(kvctl):
    ran = kvctl("status", "--socket", "/tmp/none.sock")
    assert ran.code == Exit.UNREACHABLE
    assert "/tmp/none.sock" in ran.err


def test_socket_and_timeout_reach_the_daemon(kvctl, daemon):
    daemon.replies["Admin/Status"] = admin_pb2.StatusResponse()
    kvctl("status", "-s", "/tmp/a.sock", "-t", "2.5")
    kvctl("status")
    assert daemon.sockets == ["/tmp/a.sock", "/run/test.sock"]
    assert daemon.timeouts == [2.5, 10.0]


def test_an_interrupt_has_its_code(kvctl, daemon):
    def interrupt(_request):
        raise KeyboardInterrupt

    daemon.replies["Admin/Status"] = interrupt
    assert kvctl("status").code == Exit.INTERRUPTED


@pytest.mark.parametrize(
    "words", [("nothing",), ("status", "--nothing"), ("status", "-o", "xml"), ("status", "-t", "0")]
)
def test_a_wrong_command_line_is_a_usage_error(kvctl, words):
    assert kvctl(*words).code == Exit.USAGE


@pytest.mark.parametrize(
    ("words", "loaded"),
    [
        (["status", "-o", "json"], {"status"}),
        (["why", "--tokens", "1"], {"why"}),
        (["--help"], None),
        (["--version"], None),
        ([], None),
        (["statsu"], None),
    ],
)
def test_only_the_command_that_is_meant_is_loaded(words, loaded):
    assert commands_of(words) == loaded


def test_version(kvctl):
    ran = kvctl("--version")
    assert (ran.code, ran.out.strip()) == (Exit.OK, __version__)


def test_starting_brings_in_no_heavy_package():
    code = (
        "import sys, kvstore.tools.kvctl.main; "
        "print(sorted({'grpc', 'numpy', 'torch', 'tokenizers', 'pydantic', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_reader_that_stops_early_is_no_error():
    script = (
        "import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "from kvstore.tools.kvctl.main import main; sys.argv = ['kvctl', 'doctor']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (Exit.OK, "")
