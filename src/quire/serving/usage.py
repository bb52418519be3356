"""The route that tells what keys have used, and what they may use."""

from __future__ import annotations

import msgspec

from quire.serving.auth import Role
from quire.serving.exchange import Exchange
from quire.serving.observe import parameters


async def usage(exchange: Exchange) -> None:
    """The accounts of all keys of the key file for an admin, and for others the one of their own.

    Raises:
        InvalidRequest: it has a query.
    """
    parameters(exchange)
    sees_all = Role.ADMIN in exchange.caller.roles
    told = exchange.state.accounts.told(None if sees_all else exchange.caller.key)
    await exchange.reply(msgspec.json.encode({"object": "list", "data": told}))
