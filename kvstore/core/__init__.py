"""Values that every room shares: words, keys, namespaces, layouts, errors, clocks.

This room does no I/O, holds no state and imports no other room but the arithmetic of ``kernels.layout``.
It must not know protobuf, grpc or torch. Read ``types.py`` first, then ``namespace.py`` and ``errors.py``.
"""
