"""Several engines as one: which of them a request goes to."""
