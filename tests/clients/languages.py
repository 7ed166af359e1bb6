"""The clients of this folder: what builds and runs each; `{here}` and `{out}` are folders."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Language:
    """Commands for a client and a worker; and one that says which versions ran."""

    client: str
    worker: str
    versions: str
    build: tuple[str, ...] = ()

    def made(self, out: Path) -> tuple[str, str]:
        """Build it into a folder; answer the commands of client and worker."""

        def filled(command: str) -> str:
            return command.format(here=HERE, out=out)

        for command in (self.versions, *self.build):
            done = subprocess.run(
                filled(command), shell=True, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}: {done.stdout}"
            print(done.stdout)
        return filled(self.client), filled(self.worker)


PYTHON = shlex.quote(sys.executable)
GO = "GO111MODULE=off GOPATH=/usr/share/gocode GOCACHE={out}/cache go"
JARS = "/usr/share/java/postgresql.jar"

LANGUAGES = {
    "python": Language(
        f"{PYTHON} {{here}}/python/client.py",
        f"{PYTHON} {{here}}/python/worker.py",
        f"{PYTHON} -c 'import platform, psycopg;"
        ' print(platform.python_version(), "psycopg", psycopg.__version__)\'',
    ),
    "bash": Language(
        "bash {here}/bash/client.sh",
        "bash {here}/bash/worker.sh",
        "bash -c 'echo $BASH_VERSION' && psql --version",
    ),
    "node": Language(
        "node {here}/node/client.js",
        "node {here}/node/worker.js",
        """node -p 'process.version + " pg " + require("pg/package.json").version'""",
    ),
    "go": Language(
        "{out}/client",
        "{out}/worker",
        "go version && dpkg-query --show golang-github-lib-pq-dev",
        (
            f"{GO} build -o {{out}}/client {{here}}/go/client.go",
            f"{GO} build -o {{out}}/worker {{here}}/go/worker.go",
        ),
    ),
    "java": Language(
        f"java -cp {JARS}:{{out}} Client",
        f"java -cp {JARS}:{{out}} Worker",
        "java --version && dpkg-query --show libpostgresql-jdbc-java",
        (f"javac -cp {JARS} -d {{out}} {{here}}/java/Client.java {{here}}/java/Worker.java",),
    ),
    "ruby": Language(
        "ruby {here}/ruby/client.rb",
        "ruby {here}/ruby/worker.rb",
        """ruby -r pg -e 'puts RUBY_VERSION + " pg " + PG::VERSION'""",
    ),
    "php": Language(
        "php {here}/php/client.php",
        "php {here}/php/worker.php",
        """php -r 'echo PHP_VERSION, " pdo_pgsql ", phpversion("pdo_pgsql");'""",
    ),
    "perl": Language(
        "perl {here}/perl/client.pl",
        "perl {here}/perl/worker.pl",
        """perl -M-strict -MDBD::Pg -e 'print "$^V DBD::Pg $DBD::Pg::VERSION"'""",
    ),
}
