"""In an empty folder, by the README alone: a worker of one's own, in a framework's transaction."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from psycopg.conninfo import conninfo_to_dict

from docs.transcript import blocks
from support import Connection, rows
from taskboard.localpg import temporary_folder

ROOT = Path(__file__).parents[2]

# What such programs look like; {call} is the README's, word for word.
PSYCOPG: Final = """
import sys
import psycopg
from psycopg.types.json import Jsonb

mail = {"to": "ann@example.com", "text": "it's %"}
try:
    with psycopg.connect(sys.argv[1]) as conn:
        conn.execute("insert into orders values (1)")
        {call}
        if sys.argv[2] == "fails":
            raise RuntimeError("no money")
except RuntimeError as exc:
    print(exc)
"""
SQLALCHEMY: Final = """
import json
import sys
from sqlalchemy import create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

class Base(DeclarativeBase): ...

class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)

engine = create_engine(sys.argv[1].replace("postgresql://", "postgresql+psycopg://"))
mail = {"to": "ann@example.com", "text": "it's :p"}
try:
    with Session(engine) as session, session.begin():
        session.add(Order(id=1))
        session.flush()
        {call}
        if sys.argv[2] == "fails":
            raise RuntimeError("no money")
except RuntimeError as exc:
    print(exc)
"""
DJANGO: Final = """
import json
import os
import sys
import django
from django.conf import settings
from django.db import connection, models, transaction

names = ("NAME", "HOST", "PORT", "USER", "PASSWORD")
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"} | {
    name: os.environ["DB_" + name] for name in names}})
django.setup()

class Order(models.Model):
    id = models.IntegerField(primary_key=True)
    class Meta:
        app_label, db_table = "shop", "orders"

mail = {"to": "ann@example.com", "text": "it's %"}
try:
    with transaction.atomic():
        Order.objects.create(id=1)
        {call}
        if sys.argv[2] == "fails":
            raise RuntimeError("no money")
except RuntimeError as exc:
    print(exc)
"""


def snippet(framework: str) -> str:
    found = re.findall(rf"^\| {framework} \| `(.+)` \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(found) == 1, framework
    return str(found[0])


def test_a_job_of_a_psycopg_transaction_exists_when_it_commits(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    db.execute("create table orders (id integer primary key)")
    (tmp_path / "app.py").write_text(PSYCOPG.replace("{call}", snippet("psycopg")))
    for circumstance, jobs in (("fails", 0), ("works", 1)):
        command = [sys.executable, str(tmp_path / "app.py"), dsn, circumstance]
        subprocess.run(command, check=True, capture_output=True)
        assert rows(db, "select (select count(*) from orders), count(*) from taskboard.jobs") == [
            (jobs, jobs)
        ]


@pytest.mark.wide
def test_from_nothing_to_a_worker_of_ones_own_in_the_transactions_of_frameworks(
    empty_dsn: str,
) -> None:
    home, to = temporary_folder(), conninfo_to_dict(empty_dsn)
    environment = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k == "PATH"}
    environment |= {"HOME": str(home), "TASKBOARD_DATABASE_URL": empty_dsn} | {
        f"DB_{name}": str(to.get(key, "")) for name, key in (
            ("NAME", "dbname"), ("HOST", "host"), ("PORT", "port"), ("USER", "user"),
            ("PASSWORD", "password"))
    }  # fmt: skip

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=home, env=environment, check=False, text=True, timeout=600,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    try:
        run(sys.executable, "-m", "venv", ".venv")
        run(".venv/bin/pip", "install", "-q", f"{ROOT}[embedded]", "sqlalchemy>=2", "django>=5")
        taskboard, python = home / ".venv/bin/taskboard", home / ".venv/bin/python"
        assert "functions" in run(taskboard, "migrate")
        run(taskboard, "psql", "-qc", "create table orders (id integer primary key)")
        count = "select (select count(*) from orders), count(*) from taskboard.job_list"
        for framework, program in (("SQLAlchemy", SQLALCHEMY), ("Django", DJANGO)):
            text = program.replace("{call}", snippet(framework))
            # As a kind of its own, which the README's worker below handles.
            (home / "app.py").write_text(text.replace("'email'", "'hello'"))
            assert run(python, "app.py", empty_dsn, "fails") == "no money\n"
            assert run(taskboard, "psql", "-XAtc", count) == "0|0\n"
            run(python, "app.py", empty_dsn, "works")
            assert run(taskboard, "psql", "-XAtc", count) == "1|1\n"
            run(taskboard, "psql", "-qXc", "delete from orders; delete from taskboard.jobs")
        (hello,) = (
            block.text for block in blocks(ROOT / "README.md")
            if block.language == "python" and block.text.startswith("# hello.py")
        )  # fmt: skip
        (home / "hello.py").write_text(hello)
        run(taskboard, "enqueue", "hello", '{"name": "Ada"}')
        assert "kind=hello attempt=1 completed" in run(taskboard, "run", "hello", "--until-empty")
        assert "hello" in run(taskboard, "jobs", "--state", "completed")
    finally:
        shutil.rmtree(home)
