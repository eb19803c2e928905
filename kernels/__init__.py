"""Device and CPU kernels over paged KV slices.

This room holds the byte layout of a slice (``layout``), the arguments every attention op takes
(``paged``), and one module an op: a reference in numpy or torch, a native C++ form and a Triton form
that agree with it. It must not know what a store, a tier, a lease or a model is: it sees addresses of
slices and tensors. Read ``layout.py`` first, then ``paged.py``.

Importing this package imports neither torch nor triton; the op modules do.
"""
