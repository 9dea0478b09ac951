"""Trains draft heads on text that their target writes itself. Imports nothing: the command line loads no torch."""
