"""`python -m ioattn.cli` is the `ioattn` command."""

from ioattn.cli import main

main()
