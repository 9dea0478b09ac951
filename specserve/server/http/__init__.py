"""The server's sockets, routes and rules of HTTP."""
