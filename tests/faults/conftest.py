"""Fault tests start deployments of their own, as the end-to-end tests do."""

from tests.e2e.conftest import qwen3, start_engine, start_worker

__all__ = ["qwen3", "start_engine", "start_worker"]
