"""The device code: it imports Triton, so only `launch` imports it."""
