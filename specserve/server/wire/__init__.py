"""What goes over the wire: bodies, events and errors in the shapes of OpenAI and vLLM. No sockets, no processes."""
