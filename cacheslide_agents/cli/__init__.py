"""The command line, `cacheslide`.

In: arguments. Out: answers and JSON on stdout, everything else on stderr, an exit code.
"""

from __future__ import annotations

import sys

from cacheslide_agents.cli.exit_codes import INTERRUPTED


def main() -> None:
    """Run the command line of this process. Ctrl-C ends it quietly while it still loads, too."""
    try:
        from cacheslide_agents.cli.commands import app
        from cacheslide_agents.cli.console import open_streams

        open_streams()
        app()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(INTERRUPTED)
