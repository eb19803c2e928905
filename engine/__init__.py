"""The attached engine: any Hugging Face decoder over the tiers of the store.

This room holds weights, the model runner, block tables over the cache, scheduler and sampling; it must not
know sockets, protobuf or how the store decides: it uses ``kvstore.cache.Cache`` and ``kvstore.kernels``.
Read ``engine.py`` first, then ``scheduler.py`` and ``blocks.py``.

Importing this package imports neither torch nor transformers; its modules do.
"""
