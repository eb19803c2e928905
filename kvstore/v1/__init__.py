"""Code generated from protos/kvstore/v1 by ``make proto``; never edited by hand."""
