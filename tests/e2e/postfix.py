"""Postfix from Debian, with a folder of its own: real refusals, STARTTLS, a mailbox per address.

As root, since Postfix changes its user; unprivileged ports on loopback; nothing leaves the machine.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes, policy
from pathlib import Path

import trustme

from support import wait_for

DOMAIN = "example.test"
SIZE_LIMIT = 20_000

MAIN = """\
compatibility_level = 3.6
myhostname = mx.test
inet_interfaces = 127.0.0.1
inet_protocols = ipv4
mydestination =
mynetworks =
relay_domains =
alias_maps =
alias_database =
local_recipient_maps =
biff = no
# What is read from the tables below counts for the next connection.
max_use = 1
message_size_limit = {size}
virtual_mailbox_limit = 0
queue_directory = {folder}/queue
data_directory = {folder}/data
maillog_file = {folder}/log
maillog_file_prefixes = {folder}
virtual_mailbox_domains = {domain}
virtual_mailbox_base = {folder}/mail
virtual_mailbox_maps = static:all/
virtual_uid_maps = static:{uid}
virtual_gid_maps = static:{gid}
virtual_minimum_uid = 1
smtpd_recipient_restrictions =
  check_recipient_access texthash:{folder}/recipients, reject_unauth_destination
smtpd_tls_chain_files = {folder}/certificate
smtpd_tls_session_cache_database =
# Nobody is made to wait here.
smtpd_error_sleep_time = 0
smtpd_client_connection_rate_limit = 0
"""

MASTER = """\
{starttls} inet n - n - - smtpd -o smtpd_tls_security_level=encrypt
{plain} inet n - n - - smtpd -o smtpd_tls_security_level=none
cleanup unix n - n - 0 cleanup
qmgr unix n - n 300 1 qmgr
tlsmgr unix - - n 1000? 1 tlsmgr
rewrite unix - - n - - trivial-rewrite
bounce unix - - n - 0 bounce
defer unix - - n - 0 bounce
trace unix - - n - 0 bounce
anvil unix - - n - 1 anvil
error unix - - n - - error
retry unix - - n - - error
discard unix - - n - - discard
smtp unix - - n - - discard
virtual unix - n n - - virtual
postlog unix-dgram n - n - 1 postlogd
"""


@dataclass(frozen=True, slots=True)
class Postfix:
    """A running Postfix. `starttls` demands it, `plain` does not offer it."""

    folder: Path
    starttls: int
    plain: int

    @property
    def authority(self) -> Path:
        """The file with the certificate to trust."""
        return self.folder / "authority"

    def url(self, **options: str) -> str:
        """The value for TASKBOARD_SMTP_URL, with STARTTLS and a certificate that is trusted."""
        options = {"ca": str(self.authority)} | options
        named = "&".join(f"{name}={value}" for name, value in options.items())
        return f"smtp://127.0.0.1:{self.starttls}?{named}"

    def answer(self, **answers: str) -> None:
        """Answer RCPT like this from now on, by the local part; others are accepted."""
        lines = [f"{name}@{DOMAIN} {answer}\n" for name, answer in answers.items()]
        (self.folder / "recipients").write_text("".join(lines))

    def mails(self) -> Counter[tuple[str, str]]:
        """What has arrived, by recipient and Message-ID, once nothing is on its way any more."""
        wait_for(lambda: not list(self._on_their_way()), what="the queue to be empty")
        found: Counter[tuple[str, str]] = Counter()
        for path in (self.folder / "mail").rglob("new/*"):
            message = message_from_bytes(path.read_bytes(), policy=policy.default)
            found[str(message["X-Original-To"] or message["Delivered-To"]).split("@")[0],
                  str(message["Message-ID"])] += 1  # fmt: skip
        return found

    def _on_their_way(self) -> Iterator[Path]:
        for name in ("incoming", "active", "deferred", "maildrop"):
            yield from (p for p in (self.folder / "queue" / name).rglob("*") if p.is_file())


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@contextmanager
def postfix() -> Iterator[Postfix]:
    """Run Postfix until the block ends. Needs Debian's package, and root."""
    program, user = shutil.which("postfix", path="/usr/sbin:/usr/bin"), pwd.getpwnam("postfix")
    assert program, "apt-get install --no-install-recommends postfix"
    folder = Path(tempfile.mkdtemp(prefix="taskboard-postfix-"))
    server = Postfix(folder, *free_ports(2))
    command = [program, "-c", str(folder / "etc")]
    try:
        folder.chmod(0o755)
        for name in ("etc", "queue", "data", "mail"):
            (folder / name).mkdir()
        for name in ("data", "mail"):
            os.chown(folder / name, user.pw_uid, user.pw_gid)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(server.authority))
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
            str(folder / "certificate")
        )
        (folder / "etc" / "main.cf").write_text(
            MAIN.format(
                folder=folder, domain=DOMAIN, size=SIZE_LIMIT, uid=user.pw_uid, gid=user.pw_gid
            )
        )
        (folder / "etc" / "master.cf").write_text(
            MASTER.format(starttls=server.starttls, plain=server.plain)
        )
        server.answer()
        subprocess.run([*command, "start"], check=True, capture_output=True, timeout=20)
        yield server
    finally:
        subprocess.run([*command, "stop"], check=False, capture_output=True, timeout=20)
        shutil.rmtree(folder, ignore_errors=True)
