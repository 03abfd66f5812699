"""Processes that race for keys of a store: each is told a key at a time, and says whether it created it."""

import json
import subprocess
import sys
from typing import Any

_RACER = """
import json, sys
from patchstore.errors import AlreadyExists
from patchstore.stores import open_store
url, options, me = json.loads(sys.argv[1])
store = open_store(url, **options)
print("ready", flush=True)
for line in sys.stdin:
    try:
        store.put(line.strip(), me.encode(), if_absent=True)
        print("won", flush=True)
    except AlreadyExists:
        print("lost", flush=True)
"""


def start_racer(opening: tuple[str, dict[str, Any]], me: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _RACER, json.dumps([*opening, me])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def write_line(racer: subprocess.Popen[str], line: str) -> None:
    assert racer.stdin is not None
    racer.stdin.write(f"{line}\n")
    racer.stdin.flush()


def read_line(racer: subprocess.Popen[str]) -> str:
    assert racer.stdout is not None
    return racer.stdout.readline().strip()
