"""`python -m ioattn.cli.io` is `ioattn io`."""

from ioattn.cli.io import app

app()
