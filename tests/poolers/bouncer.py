"""A PgBouncer of our own before a server: on loopback, unprivileged, ended with the block."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support import wait_for
from taskboard.localpg import temporary_folder

PROGRAM = "/usr/sbin/pgbouncer"
# No prepared statements and no settings of sessions are looked after: as plain as it gets.
INI = """\
[databases]
* = {server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
logfile = {folder}/log
max_client_conn = 100
"""


@contextmanager
def pgbouncer(
    dsn: str, *, users: tuple[str, ...] = (), pool_mode: str = "transaction", size: int = 2,
    **options: object,
) -> Iterator[str]:
    """Stand before the server of a DSN; answer the DSN of its database through the pooler."""
    to = conninfo_to_dict(dsn)
    host = str(to["host"])
    # The server's socket is for its own user alone; root is refused by both.
    owner = pwd.getpwuid(os.stat(host).st_uid if host.startswith("/") else os.getuid())
    if owner.pw_uid == 0:
        owner = pwd.getpwnam("nobody")
    folder = temporary_folder()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = make_conninfo(**{k: to[k] for k in ("host", "port", "password") if k in to})
    ini = INI.format(server=server, port=port, folder=folder)
    chosen = {"pool_mode": pool_mode, "default_pool_size": size} | options
    ini += "".join(f"{name} = {value}\n" for name, value in chosen.items())
    (folder / "ini").write_text(ini)
    (folder / "users").write_text("".join(f'"{u}" ""\n' for u in (str(to["user"]), *users)))
    for path in (folder, *folder.iterdir()):
        shutil.chown(path, owner.pw_uid, owner.pw_gid)
    demoted = {"user": owner.pw_uid, "group": owner.pw_gid} if os.getuid() == 0 else {}
    process = subprocess.Popen([PROGRAM, "-q", folder / "ini"], cwd="/", **demoted)
    through = make_conninfo(user=to["user"], dbname=to["dbname"], host="127.0.0.1", port=port)
    try:
        wait_for(lambda: psycopg.connect(through).close() or True, what=f"{PROGRAM} to answer")
        yield through
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
