"""A conversation with a mail server, stage by stage: what goes wrong becomes an outcome."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, cast

from aiosmtplib import SMTP, SMTPException, SMTPRecipientRefused, SMTPResponseException

from taskboard.handlers import Job, Outcome, Permanent, Retry
from taskboard.mail import Mail, MailSettings

log = logging.getLogger(__name__)

SLOWLY = timedelta(minutes=15)
QUIT_SECONDS = 2.0
ABOUT_THE_MAIL = ("MAIL", "RCPT", "DATA")  # a 5yz here speaks of this mail, elsewhere of the set-up
LOGIN_WANTED = (530, 534, 535, 538)  # … but for these: a login or TLS is missing, at any stage


class Unanswered(Retry):
    """The final dot may have been seen, and nobody said so: the mail may have been taken."""


@asynccontextmanager
async def conversation(job: Job, settings: MailSettings) -> AsyncIterator[Conversation]:
    """Open a connection of this attempt's own, log in, and close it hard, whatever happens."""
    # No time-out of its own: it is a `wait_for`, which loses a cancel that meets a reply (3.11).
    smtp, protocol = SMTP(hostname=settings.host, port=settings.port, timeout=None), None
    server = Conversation(job, settings, smtp)
    try:
        async with server.stage("connect"):
            implicit = settings.encryption == "tls"
            await smtp.connect(use_tls=implicit, start_tls=False, tls_context=settings.tls)
        protocol = smtp.protocol
        async with server.stage("EHLO"):
            await smtp.ehlo()
        if settings.encryption == "starttls":
            if not smtp.supports_extension("starttls"):
                raise server.later("STARTTLS: not offered; ?starttls=off would send unencrypted")
            async with server.stage("STARTTLS"):
                await smtp.starttls()
                await smtp.ehlo()
        if settings.username:
            async with server.stage("AUTH"):
                await smtp.login(settings.username, settings.password)
        yield server
        with suppress(SMTPException, OSError):
            async with asyncio.timeout(QUIT_SECONDS):
                await smtp.quit()
    finally:
        smtp.close()
        if protocol is not None and protocol.transport is not None:
            # Not only closed: a body still in the buffer must not arrive after we gave up on it.
            cast(asyncio.WriteTransport, protocol.transport).abort()


class Conversation:
    """What is said about one mail."""

    def __init__(self, job: Job, settings: MailSettings, smtp: SMTP) -> None:
        self._job, self._settings, self._smtp = job, settings, smtp

    async def offer(self, mail: Mail, addresses: list[str]) -> dict[int, dict[str, Any]]:
        """Name sender and recipients; answer code and text for each, by class of the code."""
        encoding, options = ("utf-8", ["SMTPUTF8"]) if mail.smtputf8 else ("ascii", [])
        if mail.smtputf8 and not self._smtp.supports_extension("smtputf8"):
            raise Permanent("an address is not ASCII before the @, and the server lacks SMTPUTF8")
        async with self.stage("MAIL"):
            await self._smtp.mail(mail.sender, options=options, encoding=encoding)
        answers: dict[int, dict[str, Any]] = {2: {}, 4: {}, 5: {}}
        for address in addresses:
            async with self.stage("RCPT"):
                try:
                    code, text = await self._smtp.rcpt(address, encoding=encoding)
                except SMTPRecipientRefused as exc:
                    code, text = exc.code, exc.message
                if code in (421, *LOGIN_WANTED) or code // 100 not in answers:
                    raise SMTPResponseException(code, text)  # about the session, not the recipient
                answers[code // 100][address] = [code, _clean(text)]
        return answers

    async def send(self, wire: bytes) -> list[Any]:
        """Send the body; answer code and text of the reply that took it. Raises Unanswered.

        Not by `SMTP.data()`, which cannot tell a connection lost before the body (it did not
        happen) from one lost after it (unknown).
        """
        async with self.stage("DATA"):
            reply = await self._smtp.execute_command(b"DATA")
            if reply.code != 354 or (protocol := self._smtp.protocol) is None:
                raise SMTPResponseException(reply.code, reply.message)
        written = False
        try:
            async with self.stage("DATA", self._settings.data_timeout):
                protocol.write(wire)
                written = True
                reply = await protocol.read_response()
                if reply.code // 100 != 2:
                    raise SMTPResponseException(reply.code, reply.message)
        except Outcome as exc:
            reason = exc.__cause__
            definite = isinstance(reason, SMTPResponseException) and reason.code // 100 in (4, 5)
            if written and not definite:
                text = f"{exc} (after the final dot: unknown whether it was sent)"
                raise Unanswered(text) from reason
            raise
        return [reply.code, _clean(reply.message)]

    @asynccontextmanager
    async def stage(self, name: str, seconds: float | None = None) -> AsyncIterator[None]:
        """Turn what goes wrong in a stage into an outcome, by class of the reply, never by text."""
        seconds = seconds or self._settings.timeout
        try:
            async with asyncio.timeout(seconds):
                yield
        except SMTPResponseException as exc:
            what = f"{name}: {exc.code} {_clean(exc.message)}"
            if exc.code // 100 != 5:
                raise Retry(what) from exc
            if name in ABOUT_THE_MAIL and exc.code not in LOGIN_WANTED:
                raise Permanent(what) from exc
            raise self.later(what) from exc
        except (SMTPException, OSError) as exc:
            what = f"{name}: {_clean(str(exc)) or f'no answer in {seconds:g} s'}"
            tls = exc if isinstance(exc, ssl.SSLError) else exc.__cause__
            cut_off = isinstance(tls, ssl.SSLEOFError) or not isinstance(tls, ssl.SSLError)
            if isinstance(exc, OSError) and cut_off:
                raise Retry(what) from exc
            raise self.later(what) from exc  # a certificate, or something that is not offered

    def later(self, what: str) -> Retry:
        """A fault of the set-up, not of this mail: raise an alarm and retry slowly, no bounce."""
        job = self._job
        log.error("job=%s kind=%s attempt=%d %s", job.id, job.kind, job.attempt, what)
        return Retry(what, retry_in=SLOWLY)


def _clean(text: str) -> str:
    """Reply text that can be stored: one line, no undecodable bytes, at most 400 bytes."""
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", " ".join(text.split()))
    return line.encode()[:400].decode(errors="ignore")
