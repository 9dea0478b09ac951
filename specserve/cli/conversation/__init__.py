"""A conversation in the terminal: reading messages, answering them, and the commands that begin with a slash."""
