"""What ran on which stream, and what follows from it: pure, without torch."""
