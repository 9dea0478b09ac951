"""Several processes that answer HTTP on one address, and the one that has the engines."""
