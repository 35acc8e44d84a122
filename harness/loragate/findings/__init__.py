"""What the harness found in released versions of other people's code, and proof that it is so."""
