"""`taskboard board`: a web page over the views and verbs, for the person who has to decide.

`serve.py` reads the options and serves; `access.py` says who may come in; `app.py` has a function
for each page and one for each verb; `queries.py` has all the SQL; `life.py` puts what is stored of
a job in order of time; `samples.py` remembers the last hour, and `charts.py` draws it; `figures.py`
is for Prometheus. `pages/` are the templates. All is made here on the server: no script runs in the
browser.
"""

from __future__ import annotations

import argparse

from taskboard.cli import OK
from taskboard.console.verbs import Verb
from taskboard.settings import SettingsError


def run(verb: Verb, arguments: argparse.Namespace) -> int:
    """Serve until a signal; return the exit code. Raises SettingsError."""
    from taskboard.console.board import queries

    if arguments.show_sql:
        print("\n\n".join(f"-- {name}\n{text.strip()};" for name, text in queries.texts()))
        return OK
    try:
        from taskboard.console.board.serve import serve
    except ModuleNotFoundError as exc:
        raise SettingsError(
            f"the board needs {exc.name}", "pip install 'PATH[board]', PATH being the checkout"
        ) from None
    return serve(arguments)
