"""The board as a process: its options, the socket, its end."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import ipaddress
import json
import os
import socket
import sys

import uvicorn
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from starlette.types import ASGIApp

from taskboard.cli import FAILED, OK, database, one_database
from taskboard.connections import connect_arguments
from taskboard.console.board.access import TOKEN_LEAST, Access, Network, host_of
from taskboard.console.board.app import make_app
from taskboard.console.board.queries import ABOUT, Database
from taskboard.settings import SettingsError

TOKEN = "TASKBOARD_BOARD_TOKEN"
OWN_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Raises SettingsError when people could come in who should not."""
    access = read_access(arguments)
    with database(one_database()) as settings:
        return asyncio.run(_serve(settings.database_url, access, arguments))


def read_access(arguments: argparse.Namespace) -> Access:
    """Decide who may come in, by the options. Raises SettingsError."""
    local = is_loopback(arguments.bind)
    named = {host_of(name) for name in arguments.host or ()}
    if "" in named:
        raise SettingsError("--host names no host", "write it as it stands in the address: board")
    hosts = named | {host_of(f"[{arguments.bind}]" if ":" in arguments.bind else arguments.bind)}
    access = Access(hosts=frozenset(hosts | (OWN_NAMES if local else frozenset())))
    if arguments.login:
        access.token = os.environ.get(TOKEN, "")
        if len(access.token) < TOKEN_LEAST:
            raise SettingsError(
                f"--login takes the token from {TOKEN}, of at least {TOKEN_LEAST} characters",
                f"export {TOKEN}=$(openssl rand -base64 24)",
            )
    if bool(arguments.trusted_header) != bool(arguments.trusted_proxy):
        raise SettingsError(
            "--trusted-header and --trusted-proxy belong together",
            "name the header that bears the person's name, and the address that may send it",
        )
    if arguments.trusted_header:
        if access.token:
            raise SettingsError("a token or a proxy, not both", "leave one of them out")
        access.header, access.proxies = arguments.trusted_header, networks(arguments.trusted_proxy)
    if not (local or access.token or access.header):
        raise SettingsError(
            f"at {arguments.bind} others can reach the board",
            "say --login, or --trusted-header NAME --trusted-proxy ADDRESS, or stay at 127.0.0.1",
        )
    if not (access.token or access.header):
        access.name = _own_name()
    return access


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def networks(given: list[str]) -> tuple[Network, ...]:
    try:
        return tuple(ipaddress.ip_network(text) for text in given)
    except ValueError as exc:
        raise SettingsError(str(exc), "write --trusted-proxy 10.0.0.5 or 10.0.0.0/24") from None


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, in a container
        return f"user {os.getuid()}"


async def _serve(url: str, access: Access, arguments: argparse.Namespace) -> int:
    await _check(url, arguments.operator)
    family = socket.AF_INET6 if ":" in arguments.bind else socket.AF_INET
    try:
        listener = socket.create_server((arguments.bind, arguments.port), family=family)
    except OSError as exc:
        print(f"taskboard: {arguments.bind}, port {arguments.port}: {exc}", file=sys.stderr)
        return FAILED
    app = make_app(Database(url), access, operator=arguments.operator)
    server = make_server(app)
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    what = "operators" if arguments.operator else "reading"
    if arguments.json:
        print(json.dumps({"address": address, "operator": arguments.operator}), flush=True)
    else:
        print(f"the board is at {address}, for {what}; Ctrl-C ends it", flush=True)
    with listener:
        await server.serve([listener])
    return OK


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Make the server. It believes no header about where a request comes from."""
    return uvicorn.Server(
        uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, proxy_headers=False,
            ws="none", http="h11", loop="asyncio", lifespan="on", limit_concurrency=100,
            timeout_keep_alive=15, timeout_graceful_shutdown=3,
        )
    )  # fmt: skip


async def _check(url: str, operator: bool) -> None:
    """Look whether the login may do what is asked for. Raises SettingsError, psycopg.Error."""
    conn = await AsyncConnection.connect(
        url, row_factory=dict_row, **connect_arguments(url, "taskboard board")
    )
    async with conn:
        [about] = await (await conn.execute(ABOUT.encode())).fetchall()
    if not about["observer"]:
        raise SettingsError(
            f"{about['login']} may not read the views", "grant taskboard_observer to it"
        )
    if operator and not about["operator"]:
        raise SettingsError(
            f"--operator: {about['login']} is no operator",
            "grant taskboard_operator to it, or leave --operator out",
        )
