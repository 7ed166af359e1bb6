"""The clients of this folder: what builds and what runs each, `{here}` and `{out}` being folders."""

from __future__ import annotations

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
                filled(command), shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            assert done.returncode == 0, f"{command}: {done.stdout}"
            print(done.stdout)
        return filled(self.client), filled(self.worker)


LANGUAGES = {
    "python": Language(
        f"{sys.executable} {{here}}/python/client.py",
        f"{sys.executable} {{here}}/python/worker.py",
        f"{sys.executable} -c 'import platform, psycopg;"
        " print(platform.python_version(), psycopg.__version__)'",
    ),
    "bash": Language(
        "bash {here}/bash/client.sh",
        "bash {here}/bash/worker.sh",
        "bash -c 'echo $BASH_VERSION'; psql --version",
    ),
    "node": Language(
        "node {here}/node/client.js",
        "node {here}/node/worker.js",
        "node -p 'process.version + \" pg \" + require(\"pg/package.json\").version'",
    ),
}  # fmt: skip
