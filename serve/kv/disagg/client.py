"""A prefill engine in another process, as the one sees it that decodes."""

import itertools
import queue
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from ...host.sockets.link import Link
from ...host.sockets.secret import Refusal
from ...host.streams import warn
from ..offload.tier import Content, Key
from .messages import (
    SECONDS,
    CancelPrefill,
    GetPage,
    Handshake,
    HandshakeAccepted,
    HandshakeRejected,
    Message,
    PageData,
    Place,
    PrefillDone,
    PrefillRequest,
    link_over,
    secret_of,
    sum_of,
)
from .nixl import NixlAgent, NixlReader
from .service import Ready
from .shared_memory import SharedMemoryReader

PAUSE = 0.2  # seconds until a source that cannot be reached is tried again
LONGER = 5.0  # where it has refused
WELCOME = 1 << 16  # bytes of a first message, at most


class RemotePrefillClient:
    """A source at an address. It is reached again whenever it is lost; prompts that were asked for are then
    told of as not computed. One thread hears, one sends: who asks for a prompt waits for neither. With an
    agent pages are read through NIXL, where the source has one too, until a read does not come in time."""

    room = 0

    def __init__(
        self,
        address: tuple[str, int],
        seconds: float = SECONDS,
        agent: NixlAgent | None = None,
        key_file: str | None = None,
    ):
        self.address, self.seconds, self.damaged = address, seconds, 0
        self._agent, self._secret = agent, secret_of(key_file)
        self._hello: Handshake | None = None
        self._link: Link[Message] | None = None
        self._memory: SharedMemoryReader | NixlReader | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, Ready] = {}
        self._pages: dict[int, queue.SimpleQueue[PageData | None]] = {}
        self._words: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock, self._renewed, self._closed = threading.Lock(), threading.Event(), False
        for work in (self._hear, self._say):
            threading.Thread(target=work, name="duetto-prefill-client", daemon=True).start()

    @property
    def _place(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def is_here(self) -> bool:
        return self._link is not None

    def begin(self, prompt: Sequence[int], ready: Ready) -> int:
        number = next(self._numbers)
        with self._lock:
            if here := self._link is not None:
                self._waiting[number] = ready
                self._words.put(PrefillRequest(number, tuple(prompt)))
        if not here:
            ready([])
        return number

    def leave(self, number: int) -> None:
        with self._lock:
            if self._waiting.pop(number, None) is not None:
                self._words.put(CancelPrefill(number))

    def fetch(self, key: Key) -> Content | None:
        """A page, if it comes in time and undamaged. A source that is too slow for one is lost."""
        number, answer = next(self._numbers), queue.SimpleQueue[PageData | None]()
        until = time.monotonic() + self.seconds
        with self._lock:
            link, memory = self._link, self._memory
            if link is None:
                return None
            self._pages[number] = answer
            self._words.put(GetPage(number, key, place_of(memory)))
        try:
            page = answer.get(timeout=self.seconds)
        except queue.Empty:
            link.close()
            return None
        finally:
            self._pages.pop(number, None)
        if page is None or page.size < 0:
            return None
        try:
            content = page.content if memory is None else memory.read(page.size, until)
        except TimeoutError:
            self._give_up()
        except ValueError:  # closed meanwhile, or lost
            pass
        else:
            return self._checked(key, page, content)
        link.close()
        return None

    def _give_up(self) -> None:
        """The network carries words to the source, and no reads: its pages come another way from now on."""
        self._agent = None
        warn(f"nothing was read of {self._place} through NIXL in {self.seconds:g} s")

    def _checked(self, key: Key, page: PageData, content: Content) -> Content | None:
        if len(content) == page.size and sum_of(key, content) == page.sum:
            return content
        self.damaged += 1
        return None

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        with self._lock:
            self._hello = None if realm is None else Handshake(realm, tuple(page_bytes))
        self._lose()
        self._renewed.set()

    def close(self) -> None:
        self._closed = True
        self.renew(None, ())
        self._words.put(None)

    # ------------------------------------------------------------ threads

    def _say(self) -> None:
        """A source that takes nothing for so many seconds is lost."""
        while (word := self._words.get()) is not None:
            link = self._link
            if link is not None:
                try:
                    link.send(word)
                except (OSError, ValueError):
                    link.close()

    def _hear(self) -> None:
        while not self._closed:
            pause = PAUSE
            try:
                if (link := self._met()) is not None:
                    self._follow(link)
            except Refusal as why:
                warn(f"{self._place} computes no prompts for this engine: {why}")
                pause = LONGER
            except EOFError:
                pass
            except (OSError, ValueError) as error:
                warn(f"{self._place} is not reached, prompts are computed here until it is: {error}")
            self._lose()
            self._renewed.wait(pause if self._hello is not None else None)
            self._renewed.clear()

    def _follow(self, link: Link[Message]) -> None:
        """Take what the source sends, until it is lost."""
        with suppress(OSError, EOFError, ValueError):
            while True:
                self._take(link.receive(idle=True))

    def _met(self) -> Link[Message] | None:
        """A link to the source. Raises Refusal where it does not compute the pages that are wanted."""
        hello = self._hello
        if hello is None:
            return None
        connection = socket.create_connection(self.address, self.seconds)
        link = link_over(connection)
        try:
            self._secret.prove(connection)
            link.wait_for(self.seconds)
            link.send(hello)
            match link.receive(WELCOME):
                case HandshakeRejected(why=why):
                    raise Refusal(why)
                case HandshakeAccepted() as welcome:
                    self._enter(hello, link, welcome.room, self._memory_of(hello, welcome))
                    return link
            raise ValueError("no welcome")
        except BaseException:
            link.close()
            raise

    def _memory_of(
        self, hello: Handshake, welcome: HandshakeAccepted
    ) -> SharedMemoryReader | NixlReader | None:
        """Where pages can be read; where nowhere, they come in answers."""
        if self._agent is not None:
            try:
                if welcome.region is not None:
                    return NixlReader(self._agent, welcome.region, max(hello.page_bytes, default=0))
                why = "it has none"
            except Exception as error:  # noqa: BLE001 - NIXL's own have no name in common
                why = type(error).__name__
            warn(f"pages of {self._place} do not come through NIXL: {why}")
        return SharedMemoryReader.at(welcome.memory, welcome.proof)

    def _enter(
        self, hello: Handshake, link: Link[Message], room: int, memory: SharedMemoryReader | NixlReader | None
    ) -> None:
        with self._lock:
            if fits := self._hello is hello:
                self._link, self._memory, self.room = link, memory, room
        if not fits:
            if memory is not None:
                memory.close()
            raise EOFError("other pages are wanted by now")

    def _take(self, message: Message) -> None:
        match message:
            case PrefillDone(number=number, keys=keys):
                with self._lock:
                    ready = self._waiting.pop(number, None)
                if ready is not None:
                    ready(keys)
            case PageData(number=number):
                answer = self._pages.get(number)
                if answer is not None:
                    answer.put(message)
            case _:
                raise ValueError(f"{type(message).__name__} is no answer")

    def _lose(self) -> None:
        """Whoever waits for the source waits no more."""
        with self._lock:
            link, memory, self._link, self._memory = self._link, self._memory, None, None
            waiting, self._waiting = self._waiting, {}
            answers = list(self._pages.values())
        if link is not None:
            link.close()
        for answer in answers:
            answer.put(None)
        if memory is not None:
            memory.close()
        for ready in waiting.values():
            with suppress(Exception):
                ready([])


def place_of(memory: SharedMemoryReader | NixlReader | None) -> Place:
    match memory:
        case None:
            return "answer"
        case SharedMemoryReader():
            return "shared"
        case NixlReader():
            return "registered"
