"""`quire chat` on a terminal of its own: keys, line breaks, and what Ctrl-C does when."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from patience import PATIENCE, wait_for

CTRL_C, CTRL_D = "\x03", "\x04"
COLUMNS = 40


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            # Whoever runs the tests in the background may have Ctrl-C ignored.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # Not the environment of C, in which readline may have left the size of our terminal.
            env = {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"}
            os.execve(sys.executable, [sys.executable, "-m", "quire", *arguments], env)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.shown = ""
        self._seen = 0

    def _read(self) -> bool:
        """Take what is there; False at the end."""
        if select.select([self._fd], [], [], 0.05)[0]:
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # Linux's way of saying that the other end has closed
                return False
            self.shown += data.decode("utf-8", "replace").replace("\r\n", "\n")
            return bool(data)
        return True

    def expect(self, text: str) -> None:
        """Wait until a text is shown that was not waited for before."""

        def there() -> bool:
            going = self._read()
            found = text in self.shown[self._seen :]
            assert going or found, f"no {text!r} in {self.shown[self._seen :]!r}"
            return found

        wait_for(there, lambda: f"{text!r} in {self.shown[self._seen :]!r}")
        self._seen = self.shown.index(text, self._seen) + len(text)

    def type(self, text: str) -> None:
        """Press keys, once it waits for some: readline sees no signal while it gets ready."""
        process = psutil.Process(self.pid)
        wait_for(lambda: process.status() == psutil.STATUS_SLEEPING, "a wait for keys")
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C, whatever it does."""
        os.write(self._fd, CTRL_C.encode())

    def wait(self) -> int:
        """The exit code, once it has ended."""
        wait_for(lambda: not self._read(), lambda: f"its end after {self.shown!r}")
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


class Endless(BaseHTTPRequestHandler):
    """A server whose model repeats the last word of the question, for ever if it is `ever`."""

    protocol_version = "HTTP/1.0"
    seen: list[list[str]] = []
    gone = threading.Event()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "quire-demo"}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append([m["content"] for m in body["messages"]])
        word = self.seen[-1][-1].split()[-1]
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(10**6 if word == "ever" else 30):
                event = {"choices": [{"delta": {"content": word + " "}}]}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.gone.set()


@pytest.fixture
def url() -> Iterator[str]:
    Endless.seen, Endless.gone = [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def chat(url: str) -> Iterator[Terminal]:
    terminal = Terminal("chat", "--url", url)
    yield terminal
    terminal.close()


def test_it_names_the_model_and_says_that_it_is_a_toy(chat: Terminal, url: str) -> None:
    chat.expect("quire-demo at http://127.0.0.1:")
    chat.expect("toy model")
    chat.expect("/bye leaves.")
    chat.expect("> ")
    chat.type("/bye\n")
    assert chat.wait() == 0


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(chat: Terminal) -> None:
    chat.expect("> ")
    chat.type("for ever\n")
    chat.expect("ever ever ever ever")
    chat.interrupt()
    chat.expect("[stopped]")
    assert Endless.gone.wait(PATIENCE), "the server was told"
    chat.expect("> ")
    chat.type("and on\n")
    chat.expect("on on")
    chat.expect("> ")
    chat.type(CTRL_D)
    assert chat.wait() == 0
    first, answer, second = Endless.seen[1]
    assert (first, second) == ("for ever", "and on") and answer.startswith("ever ever ever ever")
    assert "Traceback" not in chat.shown


def test_ctrl_c_clears_the_line_and_twice_leaves(chat: Terminal) -> None:
    chat.expect("> ")
    chat.type("not this")
    chat.expect("not this")
    chat.type(CTRL_C)
    chat.expect("(Ctrl-C again or Ctrl-D leaves)")
    chat.expect("> ")
    chat.type("but this\n")
    chat.expect("this this")
    chat.expect("> ")
    chat.type(CTRL_C)
    chat.expect("(Ctrl-C again or Ctrl-D leaves)")
    chat.expect("> ")
    chat.type(CTRL_C)
    assert chat.wait() == 0
    assert Endless.seen == [["but this"]] and "Traceback" not in chat.shown


def test_lines_break_between_words(chat: Terminal) -> None:
    chat.expect("> ")
    chat.type('"""a wonderful\n')
    chat.expect("... ")
    chat.type('holiday"""\n')
    chat.expect("holiday holiday")
    chat.expect("\n> ")
    reply = [line for line in chat.shown.split("\n") if line.startswith("holiday holiday")]
    assert len(reply) == 6 and {*" ".join(reply).split()} == {"holiday"}
    assert max(map(len, reply)) <= COLUMNS
    assert Endless.seen == [["a wonderful\nholiday"]]


def has_torch(process: psutil.Process) -> bool:
    return any("torch" in mapped.path for mapped in process.memory_maps())


@pytest.mark.parametrize("moment", ["core", "loading"])
def test_ctrl_c_while_an_engine_starts(moment: str) -> None:
    terminal = Terminal("chat")
    try:
        children = wait_for(psutil.Process(terminal.pid).children, "a core")
        wait_for(lambda: moment == "core" or has_torch(children[0]), "its torch")
        terminal.interrupt()
        assert terminal.wait() == 130
        assert terminal.shown.strip() == "^C"
        assert not psutil.wait_procs(children, timeout=PATIENCE)[1]
    finally:
        terminal.close()
