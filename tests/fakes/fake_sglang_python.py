"""Stands in for the interpreter of a rollout server: `launch.py JSON` serves a stub, anything else is real Python.

The stub starts two children, as SGLang starts a scheduler and a detokenizer, and answers health checks.
FAKE_SGLANG says how it misbehaves: exit, hang, or taken:PORT.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(arguments: dict[str, object]) -> None:
    mode = os.environ.get("FAKE_SGLANG", "")
    port = int(str(arguments["port"]))
    print("arguments", json.dumps(arguments), flush=True)
    if mode == "exit":
        sys.exit("RuntimeError: the model has no such layer")
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    print("children", *(child.pid for child in children), flush=True)
    if mode == "hang":
        time.sleep(600)
    if mode == f"taken:{port}":
        sys.exit("OSError: [Errno 98] Address already in use")
    HTTPServer((str(arguments["host"]), port), Handler).serve_forever()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith("launch.py"):
        serve(json.loads(sys.argv[2]))
    else:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
