"""The `email` handler: one job is one message, sent over SMTP stage by stage.

Connecting, logging in and naming sender and recipients come before the effect, so what fails
there simply retries. The gate (`begin_effect`) stands directly before DATA. Once the final dot
may be on its way only a reply closes the effect; without one it stays open: unknown.
Recipients deferred with 4yz are the next round, in a step of its own: `send/2`, `send/3`, …
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import unicodedata
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.errors import HeaderParseError
from email.headerregistry import Address
from email.message import EmailMessage
from email.parser import BytesHeaderParser
from email.policy import EmailPolicy
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from aiosmtplib import SMTP, SMTPException, SMTPRecipientRefused, SMTPResponseException

from taskboard.handlers import Context, Handler, Job, Outcome, Permanent, Retry, handler

log = logging.getLogger(__name__)

SLOWLY = timedelta(minutes=15)
QUIT_SECONDS = 2.0
MAX_LINE, MAX_ADDRESSES = 5_000, 1_000  # Python takes seconds to fold what is far longer
ABOUT_THE_MAIL = ("MAIL", "RCPT", "DATA")  # a 5yz here speaks of this mail, elsewhere of the set-up
LOGIN_WANTED = (530, 534, 535, 538)  # … but for these: a login or TLS is missing, at any stage
URL_HINT = (
    "expected smtp://user:password@host:587 or smtps://…, options ?starttls=require|off, ca=FILE, "
    "timeout=S, data_timeout=S; write / ? # @ : % in a password as %2F %3F %23 %40 %3A %25"
)
FIELD = re.compile("to|cc|bcc|reply_to|from|subject|text|html|headers|attachments")
OUR_HEADERS = re.compile(
    "from|sender|to|cc|bcc|reply-to|subject|date|message-id|mime-version|received|return-path|"
    "dkim-signature|(content|resent)-.*"
)
HEADER_NAME = re.compile(r"[!-9;-~]{1,76}")
MEDIA_TYPE = re.compile(r"(?!message/|multipart/)([\w.+-]+)/([\w.+-]+)", re.A | re.I)
MAILBOX = re.compile(r'[^\s@<>()\[\]\\,;:"]+@[^\s@<>()\[\]\\,;:"]+')
# Encoded words too: Python decodes them, and some versions then write the line break they hid.
NOT_A_LINE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|=\?.*\?=")


@dataclass(frozen=True, slots=True)
class MailSettings:
    """Where and as whom to send; times in seconds.

    `senders`: as whom a job may send, by default as the first. `encryption`: `starttls`, `tls`
    (from the first byte) or `off`. `data_timeout` bounds the wait for the answer to the final dot:
    long, as RFC 5321 asks, because giving up on that answer is what makes second copies.
    """

    host: str
    port: int
    senders: tuple[Address, ...]
    encryption: str = "starttls"
    username: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context, repr=False)
    timeout: float = 60.0
    data_timeout: float = 600.0

    @classmethod
    def from_url(cls, url: str, mail_from: str) -> MailSettings:
        """Read TASKBOARD_SMTP_URL and TASKBOARD_MAIL_FROM (addresses separated by commas).

        Raises `ValueError` with a hint and never with the password.
        """
        senders = tuple(_address("TASKBOARD_MAIL_FROM", part) for part in mail_from.split(","))
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").encode("idna").decode(), parts.port
            user, password = unquote(parts.username or ""), unquote(parts.password or "")
            options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            times = {k: float(options.pop(k)) for k in ("timeout", "data_timeout") if k in options}
            starttls = {"require": "starttls", "off": "off"}[options.pop("starttls", "require")]
            mode, usual = {"smtp": (starttls, 587), "smtps": ("tls", 465)}[parts.scheme]
            ca = options.pop("ca", None)
            if not host or parts.path.strip("/") or parts.fragment or bool(user) != bool(password):
                raise ValueError
            if options or not all(0 < seconds < 86_400 for seconds in times.values()):
                raise ValueError
            tls = ssl.create_default_context(cafile=ca)
        except OSError as exc:
            raise ValueError(f"TASKBOARD_SMTP_URL: ca is no file of certificates: {exc}") from exc
        except (ValueError, KeyError):  # not chained: the text may quote a piece of the password
            raise ValueError(f"TASKBOARD_SMTP_URL: {URL_HINT}") from None
        return cls(host, port or usual, senders, mode, user, password, tls, **times)


@dataclass(frozen=True, slots=True)
class Mail:
    """A checked message: its envelope, and the bytes that follow DATA, final dot included."""

    sender: str
    recipients: list[str]
    message_id: str
    smtputf8: bool
    wire: bytes


def email_handler(settings: MailSettings) -> Handler:
    """Make the handler of kind `email` for one mail server."""

    @handler("email")
    async def email(ctx: Context) -> dict[str, Any]:
        return await send_mail(ctx, settings)

    return email


async def send_mail(ctx: Context, settings: MailSettings) -> dict[str, Any]:
    """Send the job's mail to whoever has not had it yet.

    Returns `message_id`, `accepted`, `refused` (address: [code, text]) and `rounds`. Raises
    `Permanent` (invalid, or refused by everybody) or `Retry` (also while recipients are deferred).
    """
    try:
        mail = compose(ctx.job, settings)
    except ValueError as exc:
        raise Permanent(f"invalid mail: {exc}") from exc
    left, rounds, step = mail.recipients, list[dict[str, Any]](), "send"
    while left and ctx.job.attempt > 1:  # nothing can lie behind a first attempt
        effect = await ctx.begin_effect(step)
        if effect.state != "done":
            # A look only. Closed again, so that a crash while connecting is not an unknown outcome.
            await ctx.end_effect(step, happened=False)
            break
        # A person's `resolve` leaves no record, and speaks for the whole round.
        rounds.append(effect.result or {"accepted": left, "refused": {}, "deferred": {}})
        left = [address for address in left if address in rounds[-1]["deferred"]]
        step = f"send/{len(rounds) + 1}"
    if left:
        rounds.append(await _send_round(ctx, settings, mail, left, step))
    accepted = [address for one in rounds for address in one["accepted"]]
    refused = {address: reply for one in rounds for address, reply in one["refused"].items()}
    if deferred := rounds[-1]["deferred"]:
        raise Retry(f"accepted by {len(accepted)}, deferred: {_listing(deferred)}")
    if not accepted:
        raise Permanent(f"refused by every recipient: {_listing(refused)}")
    sent = sum(bool(one["accepted"]) for one in rounds)
    return {"message_id": mail.message_id, "accepted": accepted, "refused": refused, "rounds": sent}


async def _send_round(
    ctx: Context, settings: MailSettings, mail: Mail, left: list[str], step: str
) -> dict[str, Any]:
    """Offer the mail to `left`; returns who accepted, refused, deferred; recorded if sent."""
    encoding, options = ("utf-8", ["SMTPUTF8"]) if mail.smtputf8 else ("ascii", [])
    answers: dict[int, dict[str, Any]] = {2: {}, 4: {}, 5: {}}
    async with _session(ctx.job, settings) as smtp:
        if mail.smtputf8 and not smtp.supports_extension("smtputf8"):
            raise Permanent("an address is not ASCII before the @, and the server lacks SMTPUTF8")
        async with _stage(ctx.job, "MAIL", settings.timeout):
            await smtp.mail(mail.sender, options=options, encoding=encoding)
        for address in left:
            async with _stage(ctx.job, "RCPT", settings.timeout):
                try:
                    code, text = await smtp.rcpt(address, encoding=encoding)
                except SMTPRecipientRefused as exc:
                    code, text = exc.code, exc.message
                if code in (421, *LOGIN_WANTED) or code // 100 not in answers:
                    raise SMTPResponseException(code, text)  # about the session, not the recipient
                answers[code // 100][address] = [code, _clean(text)]
        record = {"accepted": list(answers[2]), "refused": answers[5], "deferred": answers[4]}
        if not answers[2]:
            return record
        effect = await ctx.begin_effect(step)
        if effect.state == "done":  # late evidence: an earlier attempt did send it
            return effect.result or record
        if effect.state == "unknown":
            log.warning("job=%s may have been sent before; sending %s again", ctx.job.id, step)
        record["reply"] = await _data(ctx, settings, smtp, mail, step)
        await ctx.end_effect(step, result=record)
    return record


async def _data(
    ctx: Context, settings: MailSettings, smtp: SMTP, mail: Mail, step: str
) -> list[Any]:
    """Send the body; returns code and text of the reply that took it.

    Not by `SMTP.data()`, which cannot tell a connection lost before the body (it did not happen)
    from one lost after it (unknown).
    """
    written = False
    try:
        async with _stage(ctx.job, "DATA", settings.timeout):
            reply = await smtp.execute_command(b"DATA")
            if reply.code != 354 or (protocol := smtp.protocol) is None:
                raise SMTPResponseException(reply.code, reply.message)
        async with _stage(ctx.job, "DATA", settings.data_timeout):
            protocol.write(mail.wire)
            written = True
            reply = await protocol.read_response()
            if reply.code // 100 != 2:
                raise SMTPResponseException(reply.code, reply.message)
            return [reply.code, _clean(reply.message)]
    except Outcome as exc:
        reason = exc.__cause__
        definite = isinstance(reason, SMTPResponseException) and reason.code // 100 in (4, 5)
        if written and not definite:
            raise Retry(f"{exc} (after the final dot: unknown whether it was sent)") from reason
        await ctx.end_effect(step, happened=False)
        raise


@asynccontextmanager
async def _session(job: Job, settings: MailSettings) -> AsyncIterator[SMTP]:
    """A connection of this attempt's own, logged in; closed hard, whatever happens."""
    # No time-out of its own: it is a `wait_for`, which loses a cancel that meets a reply (3.11).
    smtp, protocol = SMTP(hostname=settings.host, port=settings.port, timeout=None), None
    try:
        async with _stage(job, "connect", settings.timeout):
            implicit = settings.encryption == "tls"
            await smtp.connect(use_tls=implicit, start_tls=False, tls_context=settings.tls)
        protocol = smtp.protocol
        async with _stage(job, "EHLO", settings.timeout):
            await smtp.ehlo()
        if settings.encryption == "starttls":
            if not smtp.supports_extension("starttls"):
                raise _later(job, "STARTTLS: not offered; ?starttls=off would send unencrypted")
            async with _stage(job, "STARTTLS", settings.timeout):
                await smtp.starttls()
                await smtp.ehlo()
        if settings.username:
            async with _stage(job, "AUTH", settings.timeout):
                await smtp.login(settings.username, settings.password)
        yield smtp
        with suppress(SMTPException, OSError):
            async with asyncio.timeout(QUIT_SECONDS):
                await smtp.quit()
    finally:
        smtp.close()
        if protocol is not None and protocol.transport is not None:
            # Not only closed: a body still in the buffer must not arrive after we gave up on it.
            cast(asyncio.WriteTransport, protocol.transport).abort()


@asynccontextmanager
async def _stage(job: Job, name: str, seconds: float) -> AsyncIterator[None]:
    """Turn what goes wrong in one stage into an outcome, by class of the reply, never by text."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except SMTPResponseException as exc:
        what = f"{name}: {exc.code} {_clean(exc.message)}"
        if exc.code // 100 != 5:
            raise Retry(what) from exc
        if name in ABOUT_THE_MAIL and exc.code not in LOGIN_WANTED:
            raise Permanent(what) from exc
        raise _later(job, what) from exc
    except (SMTPException, OSError) as exc:
        what = f"{name}: {_clean(str(exc)) or f'no answer in {seconds:g} s'}"
        tls = exc if isinstance(exc, ssl.SSLError) else exc.__cause__
        cut_off = isinstance(tls, ssl.SSLEOFError) or not isinstance(tls, ssl.SSLError)
        if isinstance(exc, OSError) and cut_off:
            raise Retry(what) from exc
        raise _later(job, what) from exc  # a certificate, or something the server does not offer


def _later(job: Job, what: str) -> Retry:
    """A fault of the set-up, not of this mail: raise an alarm and retry slowly, do not bounce."""
    log.error("job=%s kind=%s attempt=%d %s", job.id, job.kind, job.attempt, what)
    return Retry(what, retry_in=SLOWLY)


def compose(job: Job, settings: MailSettings) -> Mail:
    """Check the payload and build the message. Raises `ValueError` with the reason."""
    payload = {k: v for k, v in _typed("payload", job.payload, dict).items() if v is not None}
    if unknown := [key for key in payload if not FIELD.fullmatch(key)]:
        raise ValueError(f"unknown keys {unknown}; known are {FIELD.pattern}")
    sender = _address("from", payload["from"]) if "from" in payload else settings.senders[0]
    if sender.addr_spec not in [allowed.addr_spec for allowed in settings.senders]:
        raise ValueError(f"from: {sender.addr_spec} is not among TASKBOARD_MAIL_FROM")
    to, cc, bcc, reply_to = (_addresses(payload, key) for key in ("to", "cc", "bcc", "reply_to"))
    if not to or len(to + cc + bcc + reply_to) > MAX_ADDRESSES:
        raise ValueError(f"to: missing, or more than {MAX_ADDRESSES} addresses in all")
    # The headers name everybody in every round, so every address counts, not only who is left.
    smtputf8 = not all(a.addr_spec.isascii() for a in (sender, *to, *cc, *bcc, *reply_to))
    message = EmailMessage(WirePolicy(utf8=smtputf8, cte_type="7bit", linesep="\r\n"))
    message["From"], message["To"] = sender, to
    for name, addresses in (("Cc", cc), ("Reply-To", reply_to)):
        if addresses:
            message[name] = addresses
    message["Subject"] = _line("subject", payload.get("subject", ""))
    message["Date"] = datetime.now(UTC)
    message["Message-ID"] = message_id = f"<{job.id}@{sender.domain}>"
    for name, value in _typed("headers", payload.get("headers", {}), dict).items():
        if not HEADER_NAME.fullmatch(name) or OUR_HEADERS.fullmatch(name.lower()):
            raise ValueError(f"headers: {name!r} cannot be set here")
        message[name] = _line(f"headers: {name}", value)
    text = _typed("text", payload.get("text", ""), str)
    html = _typed("html", payload.get("html", ""), str)
    if text or not html:
        message.set_content(text)
    if html:
        (message.add_alternative if text else message.set_content)(html, subtype="html")
    for item in _typed("attachments", payload.get("attachments", []), list):
        _attach(message, _typed("attachments", item, dict))
    raw = message.as_bytes()
    if BytesHeaderParser().parsebytes(raw).keys() != message.keys():
        raise ValueError("a value would add a header")
    lines = re.sub(rb"\r\n|\r|\n", b"\r\n", raw.rstrip(b"\r\n") + b"\n")
    wire = re.sub(rb"(?m)^\.", b"..", lines) + b".\r\n"
    recipients = list(dict.fromkeys(address.addr_spec for address in (*to, *cc, *bcc)))
    return Mail(sender.addr_spec, recipients, message_id, smtputf8, wire)


class WirePolicy(EmailPolicy):
    """Folds a plain ASCII header only where it must: Python makes encoded words of long URLs."""

    def fold_binary(self, name: str, value: Any) -> bytes:
        """Return one header as bytes."""
        wide = self.clone(max_line_length=990) if str(value).isascii() else self
        return EmailPolicy.fold_binary(wide, name, value)


def _attach(message: EmailMessage, item: dict[str, Any]) -> None:
    if item.keys() != {"name", "type", "base64"}:
        raise ValueError("attachments: each has name, type and base64, and nothing else")
    name = _line("attachments: name", item["name"])
    if not (media := MEDIA_TYPE.fullmatch(_line("attachments: type", item["type"]))):
        raise ValueError(f"attachments: {name!r}: not a type like application/pdf")
    try:
        data = b64decode("".join(_typed("base64", item["base64"], str).split()), validate=True)
    except ValueError as exc:
        raise ValueError(f"attachments: {name!r}: bad base64: {exc}") from exc
    message.add_attachment(data, maintype=media[1], subtype=media[2], filename=name)


def _addresses(payload: dict[str, Any], key: str) -> list[Address]:
    value = payload.get(key, [])
    return [_address(key, item) for item in (value if isinstance(value, list) else [value])]


def _address(where: str, value: object) -> Address:
    """`a@example.com` or `Name <a@example.com>`; the domain becomes ASCII and lower case."""
    name, spec = "", (text := _line(where, value).strip())
    if text.endswith(">"):
        name, _, spec = text[:-1].rpartition("<")
    try:
        if not MAILBOX.fullmatch(spec) or len(spec) > 254:
            raise ValueError("exactly one mailbox is expected")
        local, domain = spec.split("@")
        if not domain.isascii():
            name_asked, domain = domain, domain.encode("idna").decode()
            # This codec maps some letters to others (ß to ss), which is another domain today.
            if domain.encode().decode("idna") != unicodedata.normalize("NFKC", name_asked).lower():
                raise ValueError("write this domain as xn--…")
        Address(addr_spec=f"{re.sub('[^ -~]', 'x', local)}@{domain}")  # raises on bad syntax
    except (ValueError, HeaderParseError, IndexError) as exc:
        raise ValueError(f"{where}: not an address: {text[:200]!r} ({exc})") from exc
    return Address(name.strip().strip('"'), local, domain.lower())


def _line(where: str, value: object) -> str:
    text: str = _typed(where, value, str)
    if len(text) > MAX_LINE or NOT_A_LINE.search(text):
        raise ValueError(f"{where}: too long, a line break or an encoded word: {text[:200]!r}")
    return text


def _typed(where: str, value: object, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: expected {kind.__name__}, not {type(value).__name__}")
    return value


def _clean(text: str) -> str:
    """Reply text that can be stored: one line, no undecodable bytes, at most 400 bytes."""
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", " ".join(text.split()))
    return line.encode()[:400].decode(errors="ignore")


def _listing(replies: dict[str, Any]) -> str:
    return "; ".join(f"{address}: {code} {text}" for address, (code, text) in replies.items())
