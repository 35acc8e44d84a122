"""A module that cannot be imported."""

raise RuntimeError("no driver for this card")
