"""Group of processes that serve one model on a mesh of all their devices. Rank 0 schedules and sends the
others which program comes next; every rank runs it, as multi-controller JAX requires.

A mesh is one failure domain: where a rank is lost, every process of the group ends.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import jax

from ...host.process import is_inherited
from ...host.sockets.handshake import HandshakeRejected
from ...host.sockets.link import Link
from ...host.streams import tell
from .messages import Beat, End, Message, Order
from .supervisor import LOST, end_process

CAUSE = 2.0  # seconds in which this rank may find by itself the error that ended another
BEATS = 10  # heartbeats in the time after which a silent rank is lost


class ProcessGroup:
    """This process's rank among `size` ranks and its links: rank 0 has one to each other rank, in their
    order; the others have one to rank 0. A rank is lost that sends nothing, or completes no order, for
    `seconds`.

    `serves` is set once the start is over. `shutdown` is called when the group ends.
    """

    def __init__(self, rank: int, size: int, links: Sequence[Link[Message]], seconds: float):
        self.rank, self.size, self.seconds = rank, size, seconds
        self.shutdown: Callable[[], None] = lambda: None
        self._links = dict(zip(range(1, size) if rank == 0 else [0], links, strict=True))
        self._told = self._done = 0  # orders
        self._progress: dict[int, tuple[int, float]] = {}  # orders that a rank has done, and since when
        self._heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.serves = self.ended = False
        self._refused = False  # this process cannot go on
        for other, link in self._links.items():
            self._progress[other] = 0, time.monotonic()
            self._start(self._hear, other, link)
        self._start(self._beat)

    def _start(self, work: Callable[..., None], *given: Any) -> None:
        threading.Thread(target=work, args=given, name="duetto-group", daemon=True).start()

    # ------------------------------------------------------------ words

    def tell(self, message: Message) -> None:
        """Send a message over all links of this rank."""
        self._told += isinstance(message, Order)
        for other, link in self._links.items():
            try:
                link.send(message)
            except OSError as error:
                self._lost(f"rank {other} cannot be reached: {error}")

    def orders(self) -> Iterator[Order]:
        """Yield rank 0's orders until it ends; an order counts as done when the next is taken."""
        while isinstance(message := self._heard.get(), Order):
            yield message
            self._done += 1
        self._part()

    def end(self) -> None:
        """End all processes of the group, from rank 0. A process that was forked from it does nothing."""
        if not self.ended and not is_inherited():
            self.ended = True
            self.tell(End())
            self._part()

    def _part(self) -> None:
        self.shutdown()
        for link in self._links.values():
            link.close()

    def lose(self, why: str, code: int = LOST) -> NoReturn:
        """End the process now: its programs would wait for ranks that are lost."""
        end_process(code, f"rank {self.rank} ends: {why}")

    def refuse(self, error: BaseException) -> NoReturn:
        """End all processes of the group for an error of this one, rank 0 first: it may have found the same
        error, and reports it to its caller."""
        time.sleep(CAUSE)  # a rank that was lost fails the others' programs, and its link says so
        if isinstance(error, jax.errors.JaxRuntimeError):
            self.lose(f"a program failed: {error}")
        tell(f"duetto: rank {self.rank} ends: {error}")
        self._refused = True
        for link in self._links.values():
            with suppress(OSError):
                link.send(HandshakeRejected(str(error)))
        if self.rank:
            time.sleep(self.seconds)
        end_process(1)

    # ------------------------------------------------------------ threads

    def _hear(self, other: int, link: Link[Message]) -> None:
        try:
            while not self.ended:
                self._take(other, link.receive())
        except EOFError:
            self._lost(f"rank {other} has ended")
        except TimeoutError:
            self._lost(f"rank {other} has said nothing for {self.seconds:g} s")
        except (OSError, ValueError) as error:
            self._lost(f"rank {other} cannot be heard: {error}")

    def _lost(self, why: str, code: int = LOST) -> None:
        if self.ended:
            return
        if self._refused:
            end_process(1)
        self.lose(why, code)

    def _take(self, other: int, message: Message) -> None:
        match message:
            case Beat(done=done):
                before, since = self._progress[other]
                moves = done > before or done == self._told
                self._progress[other] = done, time.monotonic() if moves else since
            case HandshakeRejected(why=why):
                time.sleep(0 if self.rank else CAUSE)
                self._lost(f"rank {other}: {why}", 1)
            case End():
                self.ended = True
                if self._refused or not self.serves:  # the main thread may wait for rank 0
                    self._part()
                    end_process(int(self._refused))
                self._heard.put(message)
            case _:
                self._heard.put(message)

    def _beat(self) -> None:
        while not self.ended:
            time.sleep(self.seconds / BEATS)
            for other, link in self._links.items():
                with suppress(OSError):  # the thread that receives from it reports it
                    link.send(Beat(self._done))
                done, since = self._progress[other]
                if done < self._told and time.monotonic() - since > self.seconds:
                    self._lost(f"rank {other} has done no order for {self.seconds:g} s")
