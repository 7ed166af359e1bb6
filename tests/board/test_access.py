"""Who comes in and who does not: host names, the token, a proxy's header, forms of other sites."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import pytest

from board.conftest import Open, words
from console.conftest import claim, enqueue
from support import Connection, rows
from taskboard.cli import main
from taskboard.console.board import access
from taskboard.console.board.access import Access

TOKEN = "correct horse battery staple"
HERE = (ipaddress.ip_network("127.0.0.1"),)


@pytest.fixture
def failed(db: Connection) -> str:
    """The id of a job that has failed."""
    job_id = enqueue(db, "mail")
    rows(db, "select taskboard.fail(%s, %s, permanent => true)", claim(db, "mail"))
    return job_id


def state(db: Connection, job_id: str) -> str:
    found: str = rows(db, "select state from taskboard.job(%s)", [job_id])[0][0]
    return found


def test_a_name_that_was_pointed_at_us_is_refused(board: Open) -> None:
    site = board()
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "a b"):
        answer = site.get("/", headers={"Host": host})
        assert answer.status_code in (400, 421) and "Taskboard" not in answer.text, host
    for host in ("localhost:1234", "LOCALHOST", "[::1]:80", "127.0.0.1"):
        assert site.get("/jobs", headers={"Host": host}).status_code == 200, host


def test_a_form_without_its_token_or_with_that_of_another_session_changes_nothing(
    failed: str, db: Connection, board: Open
) -> None:
    site = board(operator=True)
    other = httpx.Client(base_url=site.address)
    foreign = other.get(f"/jobs/{failed}").text.split('name="form_token" value="')[1][:64]
    site.get("/jobs")
    for token in ("", "0" * 64, foreign, "\u00e9"):
        answer = site.post("/do/retry", {"form_token": token, "job_id": failed})
        assert answer.status_code == 403 and "load the page again" in words(answer)
    assert state(db, failed) == "failed"
    assert site.act("retry", f"/jobs/{failed}", job_id=failed).status_code == 303
    assert state(db, failed) == "ready"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
        {"Origin": ""}, {"Origin": "http://["}, {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)  # fmt: skip
def test_a_form_that_another_site_sends_changes_nothing(
    headers: dict[str, str], failed: str, db: Connection, board: Open
) -> None:
    site = board(operator=True)
    data = {"form_token": site.form_token(f"/jobs/{failed}"), "job_id": failed}
    answer = site.client.post("/do/retry", data=data, headers=headers)
    assert answer.status_code == 403 and state(db, failed) == "failed"


def test_get_changes_nothing_and_other_methods_are_refused(
    failed: str, db: Connection, board: Open
) -> None:
    site = board(operator=True)
    query = {"form_token": site.form_token(f"/jobs/{failed}"), "job_id": failed}
    assert site.get("/do/retry", params=query).status_code == 405
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE"):
        assert site.client.request(method, "/do/retry", params=query).status_code == 405
    assert state(db, failed) == "failed"


def test_an_observers_board_refuses_every_form(failed: str, db: Connection, board: Open) -> None:
    site = board(token=TOKEN)
    site.post("/login", {"form_token": site.form_token("/login"), "name": "a", "token": TOKEN})
    form = site.form_token("/jobs")
    answer = site.post("/do/retry", {"form_token": form, "job_id": failed})
    assert answer.status_code == 403 and "started read-only" in words(answer)
    assert state(db, failed) == "failed"


def test_with_a_token_nothing_is_shown_or_done_before_the_login(
    failed: str, db: Connection, board: Open
) -> None:
    site = board(operator=True, token=TOKEN)
    for path in ("/", "/jobs", f"/jobs/{failed}", "/held", "/incidents", "/workers", "/schedules"):
        answer = site.get(path)
        assert answer.status_code == 303 and answer.headers["location"].startswith("/login?next=")
    form = site.form_token("/login")
    answer = site.post("/do/retry", {"form_token": form, "job_id": failed})
    assert answer.status_code == 403 and state(db, failed) == "failed"

    def come_in(**fields: str) -> httpx.Response:
        plain = {"form_token": site.form_token("/login"), "name": "ann", "token": TOKEN}
        return site.post("/login", plain | fields)

    for fields in ({"token": "wrong"}, {"token": ""}, {"name": " \n"}, {"token": "\u00e9"}):
        answer = come_in(**fields)
        assert answer.status_code == 403 and site.get("/").status_code == 303
    answer = come_in(next="/jobs?state=failed")
    assert answer.status_code == 303 and answer.headers["location"] == "/jobs?state=failed"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
    assert "Secure" not in cookie
    assert site.act("retry", f"/jobs/{failed}", job_id=failed).status_code == 303
    assert rows(db, "select detail from taskboard.incident_list") == [("was failed; ann",)]
    assert site.post("/logout", {"form_token": site.form_token("/jobs/" + failed)}).is_redirect
    assert site.get("/jobs").status_code == 303


def test_the_way_on_after_a_login_leads_nowhere_else(board: Open) -> None:
    site = board(token=TOKEN)
    for away in ("https://evil.example", "//evil.example", "/\\evil.example", "jobs", "/a b"):
        form = {"form_token": site.form_token("/login"), "name": "a", "token": TOKEN, "next": away}
        assert site.post("/login", form).headers["location"] == "/", away
        site.client.cookies.clear()


def test_a_cookie_that_was_made_up_or_is_too_old_is_no_session(
    board: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = board(token=TOKEN)
    good = site.access.open("ann").cookie
    told, _, signature = good.partition(".")
    name = f"taskboard_board_{httpx.URL(site.address).port}"
    assert site.get("/jobs", headers={"Cookie": f"{name}={good}"}).status_code == 200
    foreign = Access(hosts=frozenset()).open("ann").cookie
    for made_up in (told, f"{told}.", f"x{told}.{signature}", foreign, "....", "\u00e9".encode()):
        cookie = made_up if isinstance(made_up, bytes) else made_up.encode()
        headers = [(b"Cookie", name.encode() + b"=" + cookie)]
        assert site.client.get("/jobs", headers=headers).status_code == 303, made_up
    monkeypatch.setattr(access, "SESSION_LASTS", -1.0)
    assert site.get("/jobs", headers={"Cookie": f"{name}={good}"}).status_code == 303


def test_the_cookie_is_for_https_alone_where_the_page_is(board: Open) -> None:
    site = board(token=TOKEN, hosts=frozenset({"board.example", "127.0.0.1"}))
    form = {"form_token": site.form_token("/login"), "name": "a", "token": TOKEN}
    headers = {"Host": "board.example", "Origin": "https://board.example"}
    answer = site.client.post("/login", data=form, headers=headers)
    assert answer.status_code == 303 and "; Secure" in answer.headers["set-cookie"]


def test_who_guesses_tokens_has_to_wait_and_so_has_everybody(
    board: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = board(token=TOKEN)
    form = {"form_token": site.form_token("/login"), "name": "a"}
    for _ in range(access.TRIES):
        assert site.post("/login", form | {"token": "guess"}).status_code == 403
    assert site.post("/login", form | {"token": TOKEN}).status_code == 429
    monkeypatch.setattr(access, "TRIES_WITHIN", 0.0)
    assert site.post("/login", form | {"token": TOKEN}).status_code == 303


def test_a_trusted_proxy_says_who_it_is_and_nobody_else_does(
    failed: str, db: Connection, board: Open
) -> None:
    site = board(operator=True, header="X-Remote-User", proxies=HERE)
    page = site.get("/jobs")
    assert page.status_code == 403 and "come by way of the proxy" in page.text
    twice = [("X-Remote-User", "ann"), ("X-Remote-User", "eve")]
    assert site.client.get("/jobs", headers=twice).status_code == 403
    assert site.get("/jobs", headers={"X-Remote-User": ""}).status_code == 403
    site.client.headers["X-Remote-User"] = "ann@example.com"
    assert site.act("retry", f"/jobs/{failed}", job_id=failed, reason="mended").is_redirect
    detail = rows(db, "select detail from taskboard.incident_list")
    assert detail == [("was failed; ann@example.com: mended",)]
    # The form of one person's page is not good for another one's session.
    form = site.form_token(f"/jobs/{failed}")
    site.client.headers["X-Remote-User"] = "eve"
    assert site.post("/do/cancel", {"form_token": form, "job_id": failed}).status_code == 403
    elsewhere = (ipaddress.ip_network("10.0.0.0/8"),)
    site = board(header="X-Remote-User", proxies=elsewhere)
    forwarded = {"X-Remote-User": "ann", "X-Forwarded-For": "10.0.0.1"}
    for headers in ({"X-Remote-User": "ann"}, forwarded):
        assert site.get("/jobs", headers=headers).status_code == 403
    assert site.get("/healthz").status_code == 200


def test_a_form_that_is_too_large_or_no_form_is_refused(board: Open) -> None:
    site = board(operator=True)
    form = site.form_token("/jobs")
    answer = site.post("/do/cancel", {"form_token": form, "reason": "x" * 100_000})
    assert answer.status_code == 413
    answer = site.client.post("/do/cancel", content=b"\xff\xfe=1")
    assert answer.status_code in (400, 403)
    answer = site.client.post("/do/cancel", content=b"&".join(b"a=1" for _ in range(1000)))
    assert answer.status_code == 400


OPTIONS = [
    (["--bind", "0.0.0.0"], "at 0.0.0.0 others can reach the board"),
    (["--bind", "::"], "at :: others can reach the board"),
    (["--bind", "board.example"], "at board.example others can reach the board"),
    (["--login"], "--login takes the token from TASKBOARD_BOARD_TOKEN"),
    (["--trusted-header", "X-User"], "belong together"),
    (["--trusted-proxy", "10.0.0.1"], "belong together"),
    (["--trusted-header", "X-User", "--trusted-proxy", "proxy"], "'proxy' does not appear to be"),
    (["--host", ""], "--host names no host"),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS)
def test_a_way_to_come_in_that_is_none_is_refused_at_the_start(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TASKBOARD_BOARD_TOKEN", "short")
    assert main(["board", "--port", "0", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_login_that_is_no_operator_cannot_start_a_board_for_operators(
    login: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for role, options, said in (
        ("taskboard_observer", ["--operator"], "is no operator"),
        ("taskboard_producer", [], "may not read the views"),
    ):
        monkeypatch.setenv("TASKBOARD_DATABASE_URL", login(role))
        assert main(["board", "--port", "0", *options]) == 2
        assert said in capsys.readouterr().err


def test_the_command_says_where_it_is_and_ends_at_a_signal(dsn: str) -> None:
    command = [sys.executable, "-m", "taskboard", "board", "--port", "0", "--json"]
    environment = os.environ | {"TASKBOARD_DATABASE_URL": dsn}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert said["operator"] is False
            until = time.monotonic() + 10
            while time.monotonic() < until:
                if httpx.get(said["address"] + "healthz").status_code == 200:
                    break
            assert httpx.get(said["address"]).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) in (0, -signal.SIGTERM)
        finally:
            process.kill()
