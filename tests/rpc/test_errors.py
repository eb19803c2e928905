"""The table of errors is complete: every class crosses the wire and comes back as itself."""

from __future__ import annotations

import grpc
import pytest

from kvstore.core import errors as core
from kvstore.core.errors import InternalError, InvalidArgument, KVStoreError, NotFound, Unavailable
from kvstore.wire.errors import ERRORS, STATUS_CODES, as_domain, from_detail, status_code, status_text, to_detail


def subclasses(kind):
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_class_is_in_the_table_once():
    known = set(subclasses(KVStoreError))
    assert set(ERRORS) == {kind for kind in known if kind.__module__ == core.__name__}
    assert len(ERRORS) == len(set(ERRORS))
    # The end of a reading plan is told by its counters in shared memory: the client alone raises it.
    assert {kind.reason for kind in known} - {kind.reason for kind in ERRORS} <= {"PLAN_ENDED"}


def test_every_reason_is_one_class_and_every_status_is_grpcs():
    assert len({error.reason for error in ERRORS}) == len(ERRORS)
    assert {error.status for error in ERRORS} <= STATUS_CODES.keys()
    assert {code.name: code.value[0] for code in grpc.StatusCode}.items() >= STATUS_CODES.items()


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_comes_back_as_itself(kind):
    error = kind.__new__(kind)
    KVStoreError.__init__(error, "what happened", field="a.field", value=17, expected="18")
    back = from_detail(to_detail(error).SerializeToString(), status_code(error))
    assert type(back) is kind
    assert vars(back) == vars(error)
    assert str(back) == "what happened"


def test_long_values_are_cut():
    detail = to_detail(InvalidArgument("keys", "x" * 5000, "less"))
    assert len(detail.value) == 400


def test_a_status_without_detail_becomes_the_nearest_class():
    assert type(from_detail(b"", STATUS_CODES["NOT_FOUND"], "gone")) is NotFound
    assert type(from_detail(b"", STATUS_CODES["UNAVAILABLE"])) is Unavailable
    assert type(from_detail(b"", 2)) is InternalError
    assert str(from_detail(b"", STATUS_CODES["NOT_FOUND"], "gone")) == "gone"


def test_a_bug_is_logged_with_its_traceback_and_told_without(caplog):
    error = as_domain(ZeroDivisionError("secret"), "kvstore.v1.Cache/Match")
    assert type(error) is InternalError
    assert "secret" not in str(error)
    incident = str(error).rpartition(" ")[2]
    (told,) = [record for record in caplog.records if incident in record.getMessage()]
    assert told.exc_info is not None


def test_a_domain_error_stays_itself():
    error = core.UnknownLease("gone")
    assert as_domain(error, "x") is error


@pytest.mark.parametrize("text", ["x", "\u00e9", "\u4e16", "\U0001f600", "\udc80", "\n"])
def test_whatever_an_error_says_fits_the_trailers_of_grpc(text):
    """8 KiB hold the detail in base64 and the status' message with each byte that is not plain written as three."""
    error = InvalidArgument("spec." + text * 20_000, text * 20_000, text * 20_000)
    detail, told = to_detail(error).SerializeToString(), status_text(error)
    assert told.isascii()
    assert 4 * len(detail) / 3 + sum(1 if " " <= c <= "~" else 3 for c in told) < 7_000
    assert isinstance(from_detail(detail, 3), InvalidArgument)
