"""A mail: where and as whom to send it, and how a job's payload becomes its bytes."""

from __future__ import annotations

import re
import ssl
import unicodedata
from base64 import b64decode
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.errors import HeaderParseError
from email.headerregistry import Address
from email.message import EmailMessage
from email.parser import BytesHeaderParser
from email.policy import EmailPolicy
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from taskboard.handlers import Job

MAX_LINE, MAX_ADDRESSES = 5_000, 1_000  # Python takes seconds to fold what is far longer
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
