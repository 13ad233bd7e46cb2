"""Dialects: pure translators between a wire and the canonical request and reply."""
