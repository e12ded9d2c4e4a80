"""The implementations of attention; they share a contract (`ioattn.registry.Backend`) and never import each other."""
