"""Generated code is what the protos make, and the proof can fail."""

from __future__ import annotations

from kvstore.tools import protogen


def test_generated_code_is_current(tmp_path, root):
    protogen.generate(tmp_path)
    fresh = protogen.generated(tmp_path / protogen.PACKAGE)
    assert len(fresh) >= 18
    assert protogen.stale(protogen.generated(root / protogen.PACKAGE), fresh) == []


def test_a_difference_is_named():
    fresh = {"a_pb2.py": b"1", "b_pb2.py": b"1", "c_pb2.py": b"1"}
    assert protogen.stale({"a_pb2.py": b"1", "b_pb2.py": b"2", "d_pb2.py": b"1"}, fresh) == [
        "b_pb2.py",
        "c_pb2.py",
        "d_pb2.py",
    ]
