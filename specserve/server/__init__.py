"""The OpenAI-compatible server. This package file knows nothing: each module says what it knows."""
