"""The client for asyncio, with the same sessions, unary calls and subscriptions as `kvplane`, as coroutines.

async with kvplane.aio.connect("127.0.0.1:7070") as client:
    async with await client.session("replica") as session:
        answer = await session.apply(part)
"""

from kvplane.aio.client import Client, connect
from kvplane.aio.interface import AsyncSessionTransport
from kvplane.aio.session import Session
from kvplane.aio.transport import GrpcTransport

__all__ = ["AsyncSessionTransport", "Client", "GrpcTransport", "Session", "connect"]
