"""An engine's own HTTP server on this machine's loopback: start it, ask it. Standard library only, as `wire`.

Replies are not streamed, so that a token costs no HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from typing import Any

HOST = "127.0.0.1"
START_S = 120


class HttpServer:
    """A server process that answers /health with 200 before the constructor returns. `command` gets `--host` and
    `--port`. Raises SystemExit if it ends or does not answer in time."""

    def __init__(self, command: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self._port: int = probe.getsockname()[1]
        command = [*command, "--host", HOST, "--port", str(self._port)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise SystemExit(f"The server did not start: {' '.join(command)}")
            time.sleep(0.05)

    def post(self, path: str, body: str) -> dict[str, Any]:
        """The reply to a JSON text. Raises SystemExit for one that is not 200."""
        return self._ask("POST", path, body)

    def get(self, path: str) -> dict[str, Any]:
        """Raises SystemExit for a reply that is not 200."""
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: str | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(HOST, self._port)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.status != 200:
            raise SystemExit(f"The server answered {response.status}: {text}")
        reply: dict[str, Any] = json.loads(text)
        return reply

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
