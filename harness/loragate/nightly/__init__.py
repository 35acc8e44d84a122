"""What a history of scans says: rates, causes, what to try next, and the morning page.
Pure; imports no torch."""
