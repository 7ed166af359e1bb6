"""The pages of the board and the forms on them: what a request asks for, and what is shown.

A page is one read-only transaction; a form is one call of a verb, then a redirect. Only POST
changes anything.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, quote, urlencode
from uuid import UUID

import psycopg
from psycopg_pool import PoolTimeout
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from taskboard.connections import is_transient, one_line
from taskboard.console.board import figures, life, queries
from taskboard.console.board.access import Access, Guard, Session, clean_name
from taskboard.console.board.queries import (
    ABOUT,
    DOCUMENTS,
    EFFECTS,
    HELD,
    INCIDENTS,
    INCIDENTS_OF_JOB,
    LAST_ID,
    ONE_JOB,
    PAGE,
    QUEUES,
    SCHEDULES,
    WORKERS,
    Database,
    Found,
    Row,
    Wanted,
)  # fmt: skip
from taskboard.console.board.samples import Samples
from taskboard.console.board.views import PAGES, render

BODY_MOST = 64 * 1024  # bytes of a form
TEXT_MOST = 500  # characters of a reason
REFRESHES = 10  # seconds, where a page was asked to load itself again
DONE = {
    "retry": "The job waits again, with a new budget of attempts.",
    "retry_failed": "The failed jobs wait again.",
    "cancel": "The job is cancelled, or its worker is asked to stop.",
    "resolve": "The question is answered, and the job goes on.",
    "evict": "The leases of this worker have ended, but for jobs that somebody has locked.",
    "pause": "Paused: what runs goes on, nothing more is claimed.",
    "resume": "The pause has ended.",
    "pause_schedule": "The schedule is changed.",
    "logout": "You have left.",
}
STATUS = {"TB002": 404, "TB003": 409, "42501": 403, "55P03": 503, "22023": 400, "22004": 400}

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Board:
    """What all pages share. `operator`: the forms are there, and documents are shown."""

    database: Database
    access: Access
    operator: bool
    samples: Samples

    async def page(self, request: Request, name: str, status: int = 200, **more: Any) -> Response:
        """Render a template for who asks."""
        session: Session = request.state.session
        path = request.url.path
        common = {
            "person": session.name, "operator": self.operator, "path": path,
            "form_token": self.access.form_token(session), "logs_in": bool(self.access.token),
            "done": DONE.get(request.query_params.get("done", "")),
            "refresh": REFRESHES if "refresh" in request.query_params else None,
        }  # fmt: skip
        text = await asyncio.to_thread(render, name, common | more)
        return Response(text, status, media_type="text/html; charset=utf-8")

    # Reading.

    async def overview(self, request: Request) -> Response:
        async with self.database.reading("jit") as ask:
            [about] = await ask(ABOUT)
            queues, workers = await ask(QUEUES), await ask(WORKERS)
            held = await ask(HELD, before=LAST_ID, most=PAGE)
            incidents = await ask(INCIDENTS, before=2**62, most=8)
        return await self.page(
            request, "overview.html", about=about, queues=queues, workers=workers, held=held,
            incidents=incidents, samples=self.samples,
        )  # fmt: skip

    async def jobs(self, request: Request) -> Response:
        asked, mistakes = wanted(request)
        found = Found() if mistakes else await self.database.jobs(asked)
        async with self.database.reading() as ask:
            [about] = await ask(ABOUT)
        given = {k: v for k, v in request.query_params.items() if v and k != "before"}
        older = urlencode(given | {"before": str(found.older)}) if found.older else ""
        return await self.page(
            request, "jobs.html", 400 if mistakes else 200, about=about, found=found, asked=asked,
            given=given, older=older, newest=urlencode(given), mistakes=mistakes,
            states=queries.LIVE + queries.FINAL,
            until=moment(found.older) if found.older else None,
        )  # fmt: skip

    async def job(self, request: Request) -> Response:
        job_id = job_of(request)
        async with self.database.reading() as ask:
            [about], found = await ask(ABOUT), await ask(ONE_JOB, job_id=job_id)
            if not found:
                raise HTTPException(404, "No such job: the id is wrong, or its history is pruned.")
            effects = await ask(EFFECTS, job_id=job_id)
            incidents = await ask(INCIDENTS_OF_JOB, job_id=job_id)
        documents = await self.documents(job_id)
        events = life.events(found[0], effects, incidents, about["now"])
        return await self.page(
            request, "job.html", about=about, job=found[0], effects=effects, documents=documents,
            events=events, not_kept=life.NOT_KEPT,
        )  # fmt: skip

    async def documents(self, job_id: UUID) -> Row | None:
        """Answer what a job carries; None where this board, or its login, may not see that."""
        if not self.operator:
            return None
        try:
            async with self.database.reading() as ask:
                found = await ask(DOCUMENTS, job_id=job_id)
                return found[0] if found else None
        except psycopg.errors.InsufficientPrivilege:
            return None

    async def held(self, request: Request) -> Response:
        async with self.database.reading() as ask:
            [about] = await ask(ABOUT)
            before = uuid_of(request.query_params.get("before", "")) or LAST_ID
            rows = await ask(HELD, before=before, most=PAGE + 1)
        return await self.page(
            request, "held.html", about=about, jobs=rows[:PAGE], more=len(rows) > PAGE
        )

    async def incidents(self, request: Request) -> Response:
        given = request.query_params.get("before", "")
        before = int(given) if re.fullmatch(r"\d{1,18}", given) else 2**62
        async with self.database.reading() as ask:
            [about], rows = await ask(ABOUT), await ask(INCIDENTS, before=before, most=PAGE + 1)
        return await self.page(
            request, "incidents.html", about=about, incidents=rows[:PAGE], more=len(rows) > PAGE
        )

    async def workers(self, request: Request) -> Response:
        async with self.database.reading("jit") as ask:
            [about], rows = await ask(ABOUT), await ask(WORKERS)
        return await self.page(request, "workers.html", about=about, workers=rows)

    async def schedules(self, request: Request) -> Response:
        async with self.database.reading() as ask:
            [about], rows = await ask(ABOUT), await ask(SCHEDULES)
        return await self.page(request, "schedules.html", about=about, schedules=rows)

    # Acting. Each makes one call, and says where to go then.

    async def act(self, request: Request) -> Response:
        """Make the call of a verb, as its form says it."""
        form = await self.form(request)
        verb = request.path_params["verb"]
        if not self.operator:
            raise HTTPException(403, "This board was started read-only: it changes nothing.")
        if verb not in queries.VERBS:
            raise HTTPException(404, "There is no such form.")
        session: Session = request.state.session
        text = clean_name(form.get("reason", ""))[:TEXT_MOST]
        values: dict[str, Any] = {
            "reason": f"{session.name}: {text}" if text else session.name,
            "queue": form.get("queue") or None, "kind": form.get("kind") or None,
            "worker": form.get("worker"), "name": form.get("name"), "step": form.get("step"),
            "force": form.get("force") == "yes", "paused": form.get("paused") == "yes",
            "happened": {"yes": True, "no": False}.get(form.get("happened", "")),
            "job_id": uuid_of(form.get("job_id", "")),
        }  # fmt: skip
        if verb == "retry_failed" and form.get("sure") != "yes":
            raise HTTPException(400, "Say that you are sure: tick the box beside the button.")
        await self.database.call(verb, **values)
        to = local(form.get("then", "")) or "/"
        return RedirectResponse(f"{to}{'&' if '?' in to else '?'}done={verb}", 303)

    async def form(self, request: Request) -> dict[str, str]:
        """Read a form, and that it is one of ours."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_MOST:
                raise HTTPException(413, "The form is too large.")
        try:
            fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=50)
        except ValueError:
            raise HTTPException(400, "The form cannot be read.") from None
        form = {name: values[0].replace("\0", "") for name, values in fields.items()}
        ours = self.access.form_token(request.state.session)
        if not hmac.compare_digest(form.get("form_token", "").encode(), ours.encode()):
            raise HTTPException(403, "This form is from an earlier visit: load the page again.")
        return form

    # Coming and going.

    async def login(self, request: Request) -> Response:
        to = local(request.query_params.get("next", "")) or "/"
        if not self.access.token:
            return RedirectResponse(to, 303)
        wrong, status = "", 200
        if request.method == "POST":
            form = await self.form(request)
            name, to = clean_name(form.get("name", "")), local(form.get("next", "")) or "/"
            known = self.access.knows(form.get("token", ""))
            if known and name:
                request.state.set_cookie(self.access.open(name))
                return RedirectResponse(to, 303)
            wrong, status = "Say who you are, and give the token.", 403
            if known is None:
                wrong, status = "Too many wrong tokens: wait a minute.", 429
            elif not known:
                wrong = "That is not the token."
        return await self.page(request, "login.html", status, next=to, wrong=wrong)

    async def logout(self, request: Request) -> Response:
        await self.form(request)
        request.state.set_cookie(self.access.open(""))
        return RedirectResponse("/login?done=logout", 303)

    async def metrics(self, request: Request) -> Response:
        """Tell how deep the queues are, to whoever is logged in or sends the token along."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if self.access.token and not request.state.session.name:
            known = scheme.lower() == "bearer" and self.access.knows(token)
            if not known:
                return PlainTextResponse("send the token: Authorization: Bearer …\n", 401)
        async with self.database.reading("jit") as ask:
            [about], queues = await ask(ABOUT), await ask(QUEUES)
        return Response(figures.text(queues, about["now"]), media_type=figures.KIND)

    async def health(self, request: Request) -> Response:
        """Tell whether the database answers; for whoever starts this process."""
        with suppress(psycopg.Error, PoolTimeout, OSError):
            async with self.database.reading() as ask:
                await ask(ABOUT)
            return PlainTextResponse("ok\n")
        return PlainTextResponse("the database does not answer\n", 503)

    async def file(self, request: Request) -> Response:
        return FileResponse(PAGES / request.url.path[1:], headers={"Cache-Control": "max-age=300"})

    # What goes wrong.

    async def on_http_error(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return await self.page(request, "message.html", exc.status_code, message=exc.detail)

    async def on_database_error(self, request: Request, exc: Exception) -> Response:
        """Say what the database said, or that it says nothing."""
        if isinstance(exc, psycopg.Error) and exc.sqlstate and not exc.sqlstate.startswith("57P"):
            message, hint = exc.diag.message_primary or "", exc.diag.message_hint or ""
            status = STATUS.get(exc.sqlstate, 500)
            if exc.sqlstate == "57014":
                message, hint = "The database took too long for this page.", "Ask for less."
                status = 503
            elif exc.sqlstate == "42501":
                hint = "The login that this board uses has no right to that."
            elif exc.sqlstate in ("3F000", "42P01", "42883"):
                hint = "Is Taskboard installed there, in this version? taskboard migrate"
            return await self.page(
                request, "message.html", status, message=message, hint=hint, code=exc.sqlstate
            )
        assert is_transient(exc) or isinstance(exc, PoolTimeout), exc
        return await self.page(
            request, "message.html", 503, message="The database does not answer.",
            hint=f"{one_line(exc)} (Load the page again in a moment.)",
        )  # fmt: skip


def wanted(request: Request) -> tuple[Wanted, list[str]]:
    """Read the filters of a page of jobs; answer what could not be understood as well."""
    given = {k: v.strip().replace("\0", "") for k, v in request.query_params.items()}
    mistakes: list[str] = []
    state = given.get("state", "")
    if state and state not in queries.LIVE + queries.FINAL:
        mistakes.append(f"There is no state {state}.")
    times: dict[str, datetime | None] = {"since": None, "until": None}
    for name in times:
        if text := given.get(name):
            try:
                at = datetime.fromisoformat(text)
                times[name] = at.replace(tzinfo=UTC) if at.tzinfo is None else at
            except ValueError:
                mistakes.append(f"{text} is no time: write 2026-07-01T08:00.")
    before = uuid_of(given.get("before", ""))
    names = {name: given.get(name, "")[:200] for name in ("queue", "kind", "worker", "key")}
    asked = Wanted(state=state, before=before, since=times["since"], until=times["until"], **names)
    return asked, mistakes


def uuid_of(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def job_of(request: Request) -> UUID:
    if (found := uuid_of(request.path_params["job_id"])) is None:
        raise HTTPException(404, "That is no job's id.")
    return found


def moment(job_id: UUID) -> datetime:
    """Answer when a job with this id was made."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=job_id.int >> 80)


def local(path: str) -> str:
    """Answer a path of ours as it is, anything else as nothing."""
    return path if re.fullmatch(r"/(?![/\\])[^\\\s]*", path) else ""


def logged_in(endpoint: Endpoint, access: Access) -> Endpoint:
    """Send who has not logged in to the login."""

    async def checked(request: Request) -> Response:
        if access.token and not request.state.session.name:
            if request.method == "POST":
                raise HTTPException(403, "Log in first.")
            target = request.url.path
            if request.url.query:
                target += f"?{request.url.query}"
            return RedirectResponse(f"/login?next={quote(target)}", 303)
        return await endpoint(request)

    return checked


def make_app(database: Database, access: Access, *, operator: bool) -> ASGIApp:
    """Make the application, guarded."""
    board = Board(database, access, operator, Samples(database))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await database.pool.open()
        sampling = asyncio.create_task(board.samples.run())
        try:
            yield
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})
            await database.pool.close(1)

    pages: dict[str, Endpoint] = {
        "/": board.overview, "/jobs": board.jobs, "/jobs/{job_id}": board.job,
        "/held": board.held, "/incidents": board.incidents, "/workers": board.workers,
        "/schedules": board.schedules,
    }  # fmt: skip
    routes = [Route(path, logged_in(page, access), methods=["GET"]) for path, page in pages.items()]
    routes += [
        Route("/do/{verb}", logged_in(board.act, access), methods=["POST"]),
        Route("/login", board.login, methods=["GET", "POST"]),
        Route("/logout", board.logout, methods=["POST"]),
        Route("/metrics", board.metrics, methods=["GET"]),
        Route("/healthz", board.health, methods=["GET"]),
        Route("/board.css", board.file, methods=["GET"]),
        Route("/icon.svg", board.file, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {
        HTTPException: board.on_http_error, psycopg.Error: board.on_database_error,
        PoolTimeout: board.on_database_error, OSError: board.on_database_error,
    }  # fmt: skip
    return Guard(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), access)
