"""Python clients of a running server, for code with and without asyncio.

with specserve.Client() as client:
    for chunk in client.stream_chat([{"role": "user", "content": "Hello"}], max_tokens=64):
        print(chunk["choices"][0]["delta"].get("content", ""), end="")
"""

from specserve.client.blocking import Client, Stream
from specserve.client.calls import AsyncClient, AsyncStream

__all__ = ["Client", "AsyncClient", "Stream", "AsyncStream"]
