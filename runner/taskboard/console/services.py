"""What doctor looks at outside the database: can a runner started here send mail and bill?"""

from __future__ import annotations

import asyncio

from taskboard import db
from taskboard.console.checks import ANSWERS_WITHIN, Finding, Look, fine, note, wrong


async def email(look: Look) -> list[Finding]:
    """Connect, encrypt and log in as the handler does; send nothing."""
    from aiosmtplib import SMTP, SMTPException

    from taskboard.handlers.email import MailSettings

    url, mail_from = look.settings.smtp_url, look.settings.mail_from
    if not (url and mail_from):
        look.off["email"] = f"set {'TASKBOARD_MAIL_FROM' if url else 'TASKBOARD_SMTP_URL'}"
        return [note("off", f"{look.off['email']}, if runners here are to send mail")]
    try:
        mail = MailSettings.from_url(url, mail_from)
    except ValueError as exc:
        look.off["email"] = "correct TASKBOARD_SMTP_URL and TASKBOARD_MAIL_FROM"
        return [wrong(str(exc), "correct it: runners do not start like this")]
    look.kinds.add("email")
    fixes = {
        "connect": "check host and port in TASKBOARD_SMTP_URL, and firewalls",
        "STARTTLS": "check its certificate (?ca=FILE), or send in the clear (?starttls=off)",
        "login": "check user and password in TASKBOARD_SMTP_URL",
    }
    stage, server = "connect", f"{mail.host}:{mail.port}"
    smtp = SMTP(hostname=mail.host, port=mail.port, timeout=ANSWERS_WITHIN)
    try:
        async with asyncio.timeout(ANSWERS_WITHIN):
            implicit = mail.encryption == "tls"
            await smtp.connect(use_tls=implicit, start_tls=False, tls_context=mail.tls)
            if mail.encryption == "starttls":
                stage = "STARTTLS"
                await smtp.starttls()
            if mail.username:
                stage = "login"
                await smtp.login(mail.username, mail.password)
    except (SMTPException, OSError) as exc:
        why = db.one_line(exc) or f"no answer within {ANSWERS_WITHIN:g} s"
        return [wrong(f"{server} {stage}: {why}", fixes[stage])]
    finally:
        smtp.close()
    return [fine(f"{server} answers" + (", and takes the login" if mail.username else ""))]


async def stripe(look: Look) -> list[Finding]:
    """Ask for the balance, which changes nothing and needs a key that is known."""
    key, base = look.settings.stripe_api_key, look.settings.stripe_base
    if not key:
        look.off["stripe"] = "set STRIPE_API_KEY"
        return [note("off", "set STRIPE_API_KEY, if runners here are to bill")]
    import httpx
    import stripe

    from taskboard.handlers.stripe import StripeSettings

    try:
        settings = StripeSettings(key, base)
    except ValueError as exc:
        look.off["stripe"] = "correct STRIPE_API_KEY"
        return [wrong(str(exc), "correct STRIPE_API_KEY: runners do not start like this")]
    look.kinds.add("stripe")
    stripe.enable_telemetry = False
    place = base or "api.stripe.com"
    http = stripe.HTTPXClient(timeout=httpx.Timeout(ANSWERS_WITHIN))
    client = stripe.StripeClient(
        key, stripe_version=settings.api_version, max_network_retries=0, http_client=http,
        base_addresses={"api": base.rstrip("/")} if base else {},
    )  # fmt: skip
    try:
        async with asyncio.timeout(ANSWERS_WITHIN):
            await client.v1.balance.retrieve_async()
    except stripe.AuthenticationError:
        return [wrong(f"{place} does not know the key", "correct STRIPE_API_KEY")]
    except (stripe.APIConnectionError, OSError) as exc:
        why = db.one_line(exc.__cause__ or exc) or f"no answer within {ANSWERS_WITHIN:g} s"
        return [wrong(f"{place}: {why}", "check TASKBOARD_STRIPE_BASE, proxies and firewalls")]
    except stripe.StripeError as exc:
        if (exc.http_status or 500) >= 500:
            return [wrong(f"{place}: {db.one_line(exc)}", "see status.stripe.com")]
        # It answers and knows the key, which may not be allowed to read the balance.
    finally:
        await http.close_async()  # type: ignore[no-untyped-call]
    return [fine(f"{place} answers; the key is for {settings.mode} mode")]
