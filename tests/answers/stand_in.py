"""A server that the job starts: stand_in.py MODEL PORT PID_FILE [at-once | later | stalls | wants-key]."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from chat_server import Reply, Server, said

model, port, pid_file, how = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]


def end() -> None:
    os.write(1, b"no memory\n")
    os._exit(7)


def reply(*_: Any) -> Reply:
    if how == ["later"]:
        end()
    if how == ["stalls"]:
        pid_file.with_suffix(".asked").touch()
        time.sleep(60)
    return said(f"by {model}")


if how == ["at-once"]:
    end()
pid_file.write_text(str(os.getpid()))
server = Server(reply, model, port)
server.key = "right" if how == ["wants-key"] else ""
server.serve_forever()
