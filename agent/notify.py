"""Word to a person who sleeps: one message when a session ends, over whatever apprise knows; it must not end anything.

The addresses hold tokens and passwords, so they stand in a file of their own, which is never stored or shown.
"""

from __future__ import annotations

from agent.config import NotifySection
from state.models import SessionStatus

ALWAYS = frozenset({SessionStatus.NEEDS_HUMAN, SessionStatus.REFUSED})
"""A session that waits for a person says so, whatever else is wished."""


def tell(section: NotifySection, status: SessionStatus, title: str, body: str) -> str | None:
    """Send one message if this end is worth one; why it could not be sent, None when all is well."""
    path = section.urls_file
    if path is None or (section.when == "needed" and status not in ALWAYS):
        return None
    # Loaded here: only who is told something pays for it.
    import apprise  # noqa: PLC0415

    try:
        urls = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        return f"{path} cannot be read: {error}"
    sender = apprise.Apprise()
    unknown = [number for number, url in enumerate(urls, 1) if url and not url.startswith("#") and not sender.add(url)]
    if unknown:
        return f"{path}: apprise does not understand line {', '.join(map(str, unknown))}"
    if not len(sender):
        return f"{path} names no address"
    return None if sender.notify(title=title, body=body) else "at least one address did not take the message"
