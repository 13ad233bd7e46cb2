"""splice decides: pure rules that turn a request and a known history into a prompt and a turn.

Values in, values out. Nothing here reads a clock, the environment, a socket or a log, and nothing
imports Redis, HTTP or transformers: `tests/test_architecture.py` fails the build otherwise.
"""
