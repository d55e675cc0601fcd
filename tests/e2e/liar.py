"""A server that says it is well and never generates; asked for its help it is the demo's llama.cpp server.

`python liar.py --port N …` listens on loopback until it is killed.
"""

import json
import runpy
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

SERVER = Path(__file__).resolve().parents[2] / "tools" / "demo" / "llama_server.py"


class Liar(BaseHTTPRequestHandler):
    """200 to everything, a token to nobody."""

    def do_GET(self) -> None:
        """Health, and an empty completion."""
        body = json.dumps({"status": "ok", "choices": [], "usage": {"completion_tokens": 0}}).encode()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


if __name__ == "__main__":
    if {"--help", "--version"} & set(sys.argv):
        sys.argv[0] = str(SERVER)
        runpy.run_path(str(SERVER), run_name="__main__")
    else:
        HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Liar).serve_forever()
