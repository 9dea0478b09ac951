"""The engine in a process of its own, and what keeps it running."""
