"""One PostgreSQL server a run, a fresh database a test; `--postgres` says which server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from support import CARELESS, Connection, Databases, Server, make_server, session
from taskboard.migrate import migrate


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--postgres", default="auto", metavar="auto|wheel|docker|BIN|DSN",
        help="the server to test on: the embedded wheel, a container, a folder with initdb and"
        " postgres, or a running server; auto takes the first that there is (default: auto)",
    )  # fmt: skip
    parser.addoption(
        "--wide", action="store_true", help="run the tests marked `wide` as well"
    )  # fmt: skip
    parser.addoption(
        "--languages", action="store_true",
        help="run the clients in all languages; tests/clients/README.md says what they need",
    )  # fmt: skip
    parser.addoption(
        "--pictures", metavar="FOLDER", help="keep what the browser shows there (a temporary one)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for flag in ("wide", "languages"):
        marked = [item for item in items if item.get_closest_marker(flag)]
        if marked and not config.getoption(flag):
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item not in set(marked)]


def pytest_configure(config: pytest.Config) -> None:
    # What the shell says about databases and keys is not meant for the tests.
    ours = ("TASKBOARD_", "STRIPE_") if is_dsn(config) else ("TASKBOARD_", "STRIPE_", "PG")
    for name in [name for name in os.environ if name.startswith(ours)]:
        del os.environ[name]


def is_dsn(config: pytest.Config) -> bool:
    choice: str = config.getoption("--postgres")
    return "=" in choice or "://" in choice


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server of this run; not durable, if it is ours."""
    try:
        server = make_server(request.config.getoption("--postgres"), CARELESS)
    except RuntimeError as exc:
        pytest.exit(str(exc), returncode=1)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> str:
    """What `--postgres` says, if it names programs; else `auto`."""
    choice: str = request.config.getoption("--postgres")
    return "auto" if choice == "docker" or is_dsn(request.config) else choice


@pytest.fixture
def server_factory(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Start further servers, `server_factory(wal_level="logical", …)`; durable as by default."""
    choice = "auto" if is_dsn(request.config) else request.config.getoption("--postgres")
    with ExitStack() as stack:

        def start(**settings: str) -> Server:
            started = make_server(choice, settings)
            stack.callback(started.close)
            return started

        yield start


@pytest.fixture(scope="session")
def databases(server: Server) -> Iterator[Databases]:
    """The databases of this run."""
    databases = Databases(server, f"taskboard_test_{os.getpid()}")
    yield databases
    databases.drop()


@pytest.fixture(scope="session")
def template(databases: Databases) -> str:
    """The name of a database with Taskboard installed, to be copied."""
    name = databases.create()
    migrate(databases.server.dsn(name))
    return name


@pytest.fixture
def new_database(databases: Databases) -> Iterator[Callable[..., str]]:
    """Make further databases, `new_database(template="…")`; each answer is a DSN."""
    databases.drop_retired()
    made: list[str] = []

    def make(template: str = "template1") -> str:
        made.append(databases.create(template))
        return databases.server.dsn(made[-1])

    yield make
    databases.retired += made


@pytest.fixture
def dsn(new_database: Callable[..., str], template: str) -> str:
    """A fresh database with Taskboard installed."""
    return new_database(template)


@pytest.fixture
def empty_dsn(new_database: Callable[..., str]) -> str:
    """A fresh database without Taskboard."""
    return new_database()


@pytest.fixture
def db(dsn: str) -> Iterator[Connection]:
    """A session of the database's owner, in autocommit mode."""
    with session(dsn, "db") as conn:
        yield conn


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Connection]]:
    """Open further sessions, `connect("A")`; options are psycopg.connect's. Closed at the end."""
    with ExitStack() as stack:

        def open_session(name: str = "test", dsn: str | None = None, **options: Any) -> Connection:
            dsn = dsn or request.getfixturevalue("dsn")
            return stack.enter_context(session(dsn, name, **options))

        yield open_session


@pytest.fixture
def login(request: pytest.FixtureRequest, dsn: str, db: Connection) -> Iterator[Callable[..., str]]:
    """Make a login, member of the roles named; the answer is its DSN."""
    made: list[str] = []

    def make(*roles: str) -> str:
        name = f"{request.path.parent.name}_{os.getpid()}_{len(made)}"
        made.append(name)
        db.execute(f"create role {name} login password 'secret'")
        for role in roles:
            db.execute(f"grant {role} to {name}")
        return make_conninfo(dsn, user=name, password="secret")

    yield make
    with session(dsn) as conn:
        for name in made:
            conn.execute(f"drop owned by {name}")
            conn.execute(f"drop role {name}")
