"""Fuzz: right messages, made wrong in fields, in bytes and in frames, sent to a real daemon over both transports.

The room knows the messages and the table of methods, not the handlers. Read ``mutate.py`` first.
"""
