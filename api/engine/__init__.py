"""Engine clients: one small protocol, one module per wire."""
