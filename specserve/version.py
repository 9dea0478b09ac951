"""The version of this package. Knows nothing else."""

__version__ = "0.1.0"
