"""Runs one SGLang HTTP server: `python launch.py '{"model_path": ..., "port": ...}'`.

The single argument is a JSON object of SGLang's own ServerArgs fields. Run by path under the
server's interpreter; it imports nothing of megatrl but the file beside it.
"""

import json
import logging
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import shim  # pyright: ignore[reportMissingImports]

# At top level: SGLang's spawned children run this file's top level again.
shim.install()
shim.let_weights_come_through_shared_memory()


def main() -> None:
    """Serve until the process is told to stop. Exits with an error on a name SGLang does not know."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    arguments = json.loads(sys.argv[1])
    level = str(arguments.get("log_level", "info")).upper()
    logging.basicConfig(level=level, format="[%(asctime)s] %(message)s", force=True)
    try:
        server_args = ServerArgs(**arguments)
    except TypeError as error:
        sys.exit(f"SGLang does not accept these server arguments: {error}")
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
