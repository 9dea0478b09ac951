"""What goes over the wire: bodies, events and errors in the shapes of OpenAI, vLLM and Anthropic."""
