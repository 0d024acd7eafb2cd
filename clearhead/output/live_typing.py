"""Reads texts that a user types into a page, with the models of checkpoints.

    typing = Typing()
    typing.answer(run, "read", b'{"text": "The ferry bell", "step": 100}', connection, threads=2)

`read` is Reader.read of headlens with a checkpoint of a run. Its answer is a uint32, little endian,
the length of the JSON that follows: a Reading without its bytes, with `step` and `has_norms`. Then
come codes and norms. `parts` is Reader.parts: the JSON of ScoreParts with its largest `pairs`.

A request costs computing time. So it needs the token of the server, which only a page of the same
address can read, in a header that a page from elsewhere cannot send without permission (CORS
preflight), which the server never gives. One request is computed at a time, and none longer than
SECONDS. It ends when its connection is closed: a page does this when the user types on.
"""

import hmac
import json
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from typing import Annotated, NamedTuple, Protocol, Self

import torch
from pydantic import Field, model_validator

from clearhead.config.schema import Settings, rejected
from clearhead.config.validation import validate
from clearhead.errors import CheckpointError, message_of
from clearhead.files import parse_json
from clearhead.models.foreign import load_any
from headlens import Reader

TOKEN = "X-Clearhead-Token"
MAX_BODY = 2**16  # bytes
SECONDS = 30
PAUSE = 0.1  # seconds between two looks at a connection that waits
KEPT = 2  # models in memory
LENGTH = re.compile(r"\d{1,18}", re.ASCII)
Number = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Number], Field(min_length=1, max_length=Reader.MOST)]


class Refused(Exception):
    """The answer to a request that is not computed: a status and a line for the user."""

    def __init__(self, status: HTTPStatus, reason: str):
        super().__init__(reason)
        self.status = status


class Cancelled(Exception):
    """The connection of a request is closed."""


class Checkpoint(NamedTuple):
    path: str
    version: tuple  # changes with the content


class Source(Protocol):
    """A run or a model."""

    def checkpoints(self) -> dict[int, Checkpoint]:
        """By step, ascending."""

    def prompts(self) -> list[list[int]]:
        """Token ids of the prompts, over which a head that is off has its mean context."""


class Request(Settings):
    step: Number
    off: list[Number] = Field([], max_length=10_000)


class ReadRequest(Request):
    text: str | None = None
    ids: Ids | None = None

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.text is None) == (self.ids is None):
            raise rejected("give either text or ids", "", "text")
        return self

    def answer(self, reader: Reader) -> tuple[bytes, str]:
        reading = reader.read(self.text, self.ids, {*self.off})
        values = vars(reading) | {"step": self.step, "has_norms": reading.norms is not None}
        codes, norms = values.pop("codes"), values.pop("norms")
        content = _as_json(values)
        parts = [struct.pack("<I", len(content)), content, codes.tobytes()]
        body = b"".join(parts + ([] if norms is None else [norms.tobytes()]))
        return body, "application/octet-stream"


class PartsRequest(Request):
    ids: Ids
    layer: Number
    head: Number
    query: Number
    key: Number

    def answer(self, reader: Reader) -> tuple[bytes, str]:
        of = self.ids, self.layer, self.head, self.query, self.key
        found = reader.parts(*of, {*self.off})
        values = vars(found) | {"pairs": found.largest()}
        del values["values"]
        return _as_json(values), "application/json; charset=utf-8"


REQUESTS = {"read": ReadRequest, "parts": PartsRequest}


def checked_length(headers: Message, token: str) -> int:
    """Returns the length of the body of a request. Raises Refused for a request that is not of a
    page of this server."""
    given = headers.get(TOKEN, "").encode("utf-8", "backslashreplace")
    if not hmac.compare_digest(given, token.encode()):
        reason = "the server was started again; load the page again"
        raise Refused(HTTPStatus.FORBIDDEN, reason)
    if headers.get("Content-Type") != "application/json":
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    if not LENGTH.fullmatch(length := headers.get("Content-Length", "")):
        raise Refused(HTTPStatus.LENGTH_REQUIRED, "the body needs a Content-Length")
    if int(length) > MAX_BODY:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the text is too long")
    return int(length)


class Typing:
    """Computes one request at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.readers: dict[Checkpoint, Reader] = {}  # the one that was used last is last
        self.check: Callable[[], None] = lambda: None  # of the request that is computed

    def answer(
        self, source: Source, what: str, body: bytes, connection: socket.socket, threads: int
    ) -> tuple[bytes, str]:
        """Returns (body, content type) of the answer to a request. Raises Refused, Cancelled, and
        FileNotFoundError without a checkpoint of its step."""
        request, check = _parsed(what, body), _watch(connection)
        while not self.lock.acquire(timeout=PAUSE):
            check()
        try:
            self.check = check
            check()
            torch.set_num_threads(threads)  # of this thread, which is new for each connection
            return request.answer(self._reader(source, request.step))
        except (TypeError, ValueError) as error:  # the model does not have it
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error
        except RuntimeError as error:  # of torch, such as no memory
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, message_of(error)) from error
        finally:
            self.lock.release()

    def _reader(self, source: Source, step: int) -> Reader:
        checkpoint = source.checkpoints().get(step)
        if checkpoint is None:
            raise FileNotFoundError(f"there is no checkpoint of step {step}")
        reader = self.readers.pop(checkpoint, None)
        if reader is None:
            for oldest in list(self.readers)[: len(self.readers) - KEPT + 1]:
                del self.readers[oldest]
            try:
                found = load_any(checkpoint.path)
            except CheckpointError as error:
                reason = f"the checkpoint of step {step} cannot be read: {error.reason}"
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, reason) from error
            reader = Reader(
                found.model, found.tokenizer, source.prompts(), found.window, lambda: self.check()
            )
        self.readers[checkpoint] = reader
        return reader


def _parsed(what: str, body: bytes) -> ReadRequest | PartsRequest:
    try:
        content = parse_json(body)
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the body {error}") from error
    if not isinstance(content, dict):
        raise Refused(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
    request, problems = validate(REQUESTS[what], content)
    if request is None:
        raise Refused(HTTPStatus.BAD_REQUEST, f"{problems[0].key}: {problems[0].reason}")
    return request


def _watch(connection: socket.socket) -> Callable[[], None]:
    """Returns a function that raises Cancelled when a connection is closed, and Refused when its
    time is over."""
    end = time.monotonic() + SECONDS

    def check() -> None:
        is_readable, _, _ = select.select([connection], [], [], 0)
        try:
            if is_readable and not connection.recv(1, socket.MSG_PEEK):
                raise Cancelled
        except OSError as error:
            raise Cancelled from error
        if time.monotonic() > end:
            reason = f"this takes longer than {SECONDS} seconds; give a shorter text"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, reason)

    return check


def _as_json(values: dict) -> bytes:
    return json.dumps(values, default=vars, allow_nan=False).encode()
