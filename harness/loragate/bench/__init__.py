"""Side-by-side timing of subjects against the floor that memory sets."""
