"""A load balancer's command line, for tests: a shell script that keeps what it was told, and how often a server had
started by then. It knows nothing of Ratchet.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tools.manners import Draining

SCRIPT = """\
#!/bin/sh
here={folder}
[ ! -e "$here/hang-$1" ] || {{ echo $$ >"$here/hung"; exec sleep 1000; }}
[ ! -e "$here/fail-$1" ] || {{ echo "no such pool" >&2; exit 3; }}
note() {{ echo "$1 $(cat "$here/starts" 2>/dev/null | wc -l)" >>"$here/told"; }}
case $1 in
  out) note out; {out} ;;
  in) note in; rm -f "$here/out" ;;
  is-out) [ -e "$here/out" ] ;;
esac
"""
AT_ONCE, LATER = 'touch "$here/out"', '( sleep 1; touch "$here/out" ) &'


class Told(NamedTuple):
    """What the balancer was told, and how many starts of the server lay before."""

    word: str
    starts: int


class Balancer:
    """The script in a folder, whose files `fail-WORD` and `hang-WORD` spoil it; a file `starts` is read, if any."""

    def __init__(self, folder: Path, out: str = AT_ONCE) -> None:
        self.folder = folder
        self.program = folder / "balancer"
        self.program.write_text(SCRIPT.format(folder=folder, out=out))
        self.program.chmod(0o755)

    def words(self, word: str) -> tuple[str, str]:
        """A command as a session file has it."""
        return str(self.program), word

    def draining(self, deadline_s: float = 20.0, probe: bool = True) -> Draining:
        """All three commands."""
        drained = self.words("is-out") if probe else ()
        return Draining(drain=self.words("out"), undrain=self.words("in"), drained=drained, deadline_s=deadline_s)

    def section(self, more: str = "") -> str:
        """The same as a part of a session file."""
        commands = {"drain": "out", "undrain": "in", "drained": "is-out"}
        lines = [f'{name} = ["{self.program}", "{word}"]' for name, word in commands.items()]
        return "\n".join(["", "[manners]", *lines, more, ""])

    def spoil(self, how: str) -> None:
        """Make it fail or hang, as in `fail-out`."""
        (self.folder / how).touch()

    @property
    def out(self) -> bool:
        """Whether the server is out."""
        return (self.folder / "out").exists()

    @property
    def told(self) -> list[Told]:
        """Everything but the probe's questions, in order."""
        path = self.folder / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Told(word, int(starts)) for word, starts in map(str.split, lines)]
