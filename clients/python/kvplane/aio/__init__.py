"""The client for asyncio: the sessions, unary calls and subscriptions of `kvplane`, awaited.

async with kvplane.aio.connect("127.0.0.1:7070") as client:
    async with await client.session("replica") as session:
        answer = await session.apply(part)
"""

from kvplane.aio.client import Client, connect
from kvplane.aio.session import AsyncSessionTransport, Session
from kvplane.aio.transport import GrpcTransport

__all__ = ["AsyncSessionTransport", "Client", "GrpcTransport", "Session", "connect"]
