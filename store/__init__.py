"""store remembers: sessions as forests of immutable turns in Redis; one round trip to find, one script to commit."""
