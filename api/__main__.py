"""`python -m api` is `tokensplice`."""

from api.cli import main

main()
