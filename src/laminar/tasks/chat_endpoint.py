"""An OpenAI-style chat endpoint for programs in this process: each conversation has an address of its own.

    POST {base_url}/chat/completions    {"model": ..., "messages": [...]}

Invariant: a request is answered once, by `Call.answer` or `Call.refuse`; when a conversation is closed, by a refusal.
"""

import http.server
import json
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Final

from laminar.tasks.protocol import Message, Turn

HOST: Final = "127.0.0.1"

MAX_BODY_BYTES: Final = 16 << 20
"""A conversation in text; a longer one would not fit any model's context."""

OVER: Final = "this conversation is over"

UNDERSTOOD: Final = frozenset({"model", "messages", "n", "stream", "user", "metadata", "store"})
"""Fields of a request that we take; `n` only as 1, `stream` only as false."""


class Refused(Exception):
    """The request cannot be answered; the text goes to the program that made it."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class Call:
    """One request of an agent: the whole conversation so far, whose next message it waits for."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self._answer: Future[Turn] = Future()

    def answer(self, turn: Turn) -> None:
        """The model's turn."""
        with suppress(InvalidStateError):
            self._answer.set_result(turn)

    def refuse(self, reason: str, status: int = 400) -> None:
        """There will be none."""
        with suppress(InvalidStateError):
            self._answer.set_exception(Refused(reason, status))

    def wait(self) -> Turn:
        """Raises `Refused`.

        waits for:  the model's turn    <- `AgentEnvironment.act`
        ends:       then, or when the conversation is closed
        """
        return self._answer.result()


Listener = Callable[[Call], object]
Listeners = dict[str, Listener]


class ChatEndpoint:
    """The server of this process, on a port of this machine only; started by the first conversation."""

    def __init__(self) -> None:
        self._listeners: Listeners = {}
        self._server: _Server | None = None
        self._starting = threading.Lock()

    def open(self, listener: Listener) -> str:
        """A new conversation: `listener` gets its calls, in the server's threads. Returns its base URL.

        The URL holds a secret: whoever does not know it cannot speak in the conversation.
        """
        with self._starting:
            if self._server is None:
                self._server = _Server(self._listeners)
                threading.Thread(target=self._server.serve_forever, daemon=True, name="chat endpoint").start()
        key = secrets.token_urlsafe(16)
        self._listeners[key] = listener
        return f"http://{HOST}:{self._server.server_address[1]}/{key}/v1"

    def close(self, base_url: str) -> None:
        """Calls to this conversation are refused from now on."""
        self._listeners.pop(base_url.split("/")[-2], None)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, listeners: Listeners) -> None:
        super().__init__((HOST, 0), _Handler)
        self.listeners = listeners


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        try:
            body = self._body()
            call = Call(messages_of(body))
            self._listener()(call)
            self._send(200, completion(call.wait(), str(body.get("model") or "policy")))
        except Refused as refusal:
            self._send(refusal.status, {"error": {"message": str(refusal), "type": "invalid_request_error"}})

    def _listener(self) -> Listener:
        key, _, rest = self.path.strip("/").partition("/")
        if rest != "v1/chat/completions":
            raise Refused("only POST {base_url}/chat/completions is served here", 404)
        if key not in self.server.listeners:
            raise Refused(OVER, 410)
        return self.server.listeners[key]

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True  # what follows cannot be told from a next request
            raise Refused(f"the request needs a Content-Length of at most {MAX_BODY_BYTES}", 413)
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise Refused(f"the request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(f"the request must be a JSON object, not a {type(body).__name__}")
        return body

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        with suppress(ConnectionError):  # an agent that is gone needs no answer
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the run's events tell of turns."""


def messages_of(body: dict[str, Any]) -> list[Message]:
    """The conversation that a request holds; raises `Refused` for what we would answer differently than asked."""
    for name, value in body.items():
        if name not in UNDERSTOOD and value is not None:
            raise Refused(f"{name} is not supported here: how the model draws is set by the recipe (rollout.sampling)")
    if body.get("n") not in (None, 1) or body.get("stream"):
        raise Refused("one answer at a time, not streamed: leave n and stream away")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list with at least one message")
    return [_message(message) for message in messages]


def _message(message: Any) -> Message:
    """`role`, `content` and other strings; a content of text parts is joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"a message is an object with a role and a content; this one is {message!r:.80}")
    told = {name: value for name, value in message.items() if value is not None and value != []}
    content = told.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused("only text is supported as content")
        told["content"] = "".join(part["text"] for part in content)
    for name, value in told.items():
        if not isinstance(value, str):
            raise Refused(f"{name} of a message must be text; this one is {value!r:.80}")
    return {"content": "", **told}


def completion(turn: Turn, model: str) -> dict[str, Any]:
    """The response to a request; `token_ids` is what was drawn and will be trained on."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": str(turn)},
        "finish_reason": "stop",
        "token_ids": list(turn.token_ids),
    }
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
    }
