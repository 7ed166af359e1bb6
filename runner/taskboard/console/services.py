"""What doctor looks at outside the database: can a runner started here send mail and bill?"""

from __future__ import annotations

import asyncio

from taskboard.connections import one_line
from taskboard.console.checks import ANSWERS_WITHIN, Finding, Look, fine, note, wrong
from taskboard.preflight import mail_lacks


async def email(look: Look) -> list[Finding]:
    """Connect, encrypt and log in as the handler does; send nothing."""
    from aiosmtplib import SMTP, SMTPException

    from taskboard.mail import MailSettings

    url, mail_from = look.settings.smtp_url, look.settings.mail_from
    if not (url and mail_from):
        look.off["email"] = mail_lacks(look.settings)
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
        why = one_line(exc) or f"no answer within {ANSWERS_WITHIN:g} s"
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
    import stripe

    from taskboard.stripe_calls import Account, StripeSettings

    try:
        settings = StripeSettings(key, base, timeout=ANSWERS_WITHIN)
    except ValueError as exc:
        look.off["stripe"] = "correct STRIPE_API_KEY"
        return [wrong(str(exc), "correct STRIPE_API_KEY: runners do not start like this")]
    look.kinds.add("stripe")
    place, account = base or "api.stripe.com", Account(settings)
    try:
        async with asyncio.timeout(ANSWERS_WITHIN):
            await account.client.v1.balance.retrieve_async()
    except stripe.AuthenticationError:
        return [wrong(f"{place} does not know the key", "correct STRIPE_API_KEY")]
    except (stripe.APIConnectionError, OSError) as exc:
        why = one_line(exc.__cause__ or exc) or f"no answer within {ANSWERS_WITHIN:g} s"
        return [wrong(f"{place}: {why}", "check TASKBOARD_STRIPE_BASE, proxies and firewalls")]
    except stripe.StripeError as exc:
        if (exc.http_status or 500) >= 500:
            return [wrong(f"{place}: {one_line(exc)}", "see status.stripe.com")]
        # It answers and knows the key, which may not be allowed to read the balance.
    finally:
        await account.aclose()
    return [fine(f"{place} answers; the key is for {settings.mode} mode")]
