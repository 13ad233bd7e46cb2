"""The soak: many rollouts over several workers while workers, Redis and connections are killed; then the checker.

`python -m tests.faults.soak --help`; `make soak` runs the long one, `tests/faults/test_soak_short.py` a short one.
"""
