"""Draws the terminal picture of a finished session from its database, as an SVG; it must not touch the database.

What it draws is what `start` and `demo` show: the last events, the live picture under them, and the closing sentence.
`python docs/picture.py STATE_DB [--output FILE] [--events N]`
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

from agent.live import LivePicture, story
from agent.report import headline
from state import events as ev
from state.store import Store

IMAGE = Path(__file__).resolve().parent / "img" / "session.svg"
WIDTH = 118
FONT_FACES = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def draw(database: Path, events: int) -> str:
    """SVG of the latest session, with its last `events` lines. Fonts are the reader's own: none is fetched."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    with Store.read(database) as reading:
        session = reading.latest_session()
        end = reading.last_event_at(session.id)
        store = Store(reading.db, reading.path, clock=lambda: end)
        picture = LivePicture(store, session.id, console)
        with picture.shown():
            picture.phase(f"{session.status.value}: {session.reason}")
            for event in told(store, session.id)[-events:]:
                picture.happened(event)
        console.print(headline(store, session.id), style="bold", highlight=False)
    return FONT_FACES.sub("", console.export_svg(title="ratchet", unique_id="session"))


def told(store: Store, session_id: str) -> list[ev.Event]:
    """The events that a watcher is told, in order."""
    rows = store.db.query("SELECT body FROM events WHERE session_id = ? ORDER BY seq", [session_id])
    return [event for row in rows if story(event := ev.EVENT.validate_json(row["body"])) is not None]


def main() -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(description="The terminal picture of a session, from its database.")
    parser.add_argument("database", type=Path)
    parser.add_argument("--output", type=Path, default=IMAGE)
    parser.add_argument("--events", type=int, default=14, help="how many of the last lines to show")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(draw(options.database, options.events))
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
