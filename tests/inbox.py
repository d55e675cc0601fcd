"""A real HTTP server that keeps what notifications are posted to it; it answers everything alike."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator

Messages = list[dict[str, str]]


class _Inbox(http.server.BaseHTTPRequestHandler):
    messages: Messages

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.messages.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Quiet."""


@contextlib.contextmanager
def inbox(login: str = "") -> Iterator[tuple[str, Messages]]:
    """Its apprise address, `login` (`user:password@`) included, and the messages that came."""
    received: Messages = []
    handler = type("OneInbox", (_Inbox,), {"messages": received})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"json://{login}127.0.0.1:{server.server_port}/", received
        finally:
            server.shutdown()
            thread.join()
