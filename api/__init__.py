"""api talks: the Litestar application, dialects, engine clients, tokenizer adapter, command line and demo."""
