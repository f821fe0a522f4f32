"""A `python` that starts at once: each call is forked from a process that has imported torch and the package.

python -m tests.helpers.preloaded SOCKET        serves the programs that `client` writes
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    socket.send_fds(server, [b"*"], [0, 1, 2])
    server.sendall(json.dumps([os.getcwd(), sys.argv[1:], dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16) or 1))
"""


@contextmanager
def python(folder: Path) -> Iterator[Path]:
    """The path of an executable in `folder` that takes a script, `-m` or `-c` as an interpreter does."""
    path, client = str(folder / "socket"), folder / "python"
    client.write_text(CLIENT.format(python=sys.executable, path=path))
    client.chmod(0o755)
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.preloaded", path]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"ready\n"
        try:
            yield client
        finally:
            server.send_signal(signal.SIGTERM)


def serve(path: str) -> None:
    """One program after the other, each in a child with the caller's standard streams, folder and environment."""
    import megatron_glm.planner.report  # noqa: F401  what takes seconds to import

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            caller, _ = listener.accept()
            with caller:
                _, streams, *_ = socket.recv_fds(caller, 1, 3)
                request = json.loads(caller.makefile("rb").read())
                child = os.fork()
                if child == 0:
                    listener.close()
                    run(request, streams)
                for stream in streams:
                    os.close(stream)
                caller.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256).encode())


def run(request: tuple[str, list[str], dict[str, str]], streams: list[int]) -> None:
    """Become the program; never returns."""
    folder, words, environment = request
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code = 0
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))  # as python does
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
