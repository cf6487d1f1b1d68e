"""Group of processes that serve one model on a mesh of all their devices. Rank 0 schedules, and sends the
other ranks which program is next. Every rank runs it, as multi-controller JAX requires.

A mesh is one failure domain: if a rank is lost, every process of the group ends.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import jax

from ...host.process import is_forked
from ...host.sockets.handshake import HandshakeRejected
from ...host.sockets.message_link import Link
from ...host.streams import print_stderr
from .messages import Beat, End, GroupMessage, Order
from .supervisor import LOST_EXIT_CODE, end_process

CAUSE_SECONDS = 2.0  # seconds in which this rank may find the error itself that ended another rank
HEARTBEATS_PER_TIMEOUT = 10  # number of heartbeats in the time after which a silent rank is lost


class ProcessGroup:
    """Group of processes, as one of its ranks sees it.

    A rank is lost if it sends nothing, or completes no order, for `timeout_seconds`.

    rank: number of this process among `size` processes.
    links: on rank 0 one link to each other rank, in their order; on other ranks one link to rank 0.
    is_serving: True once the start is over.
    has_ended: True once the group has ended.
    shutdown: called when the group ends.
    """

    def __init__(self, rank: int, size: int, links: Sequence[Link[GroupMessage]], timeout_seconds: float):
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self.shutdown: Callable[[], None] = lambda: None
        self._links = dict(zip(range(1, size) if rank == 0 else [0], links, strict=True))
        # numbers of orders that were sent, and that this rank has completed
        self._sent_orders = self._done_orders = 0
        self._progress: dict[int, tuple[int, float]] = {}  # by rank, number of completed orders, since a time
        self._received: queue.SimpleQueue[GroupMessage] = queue.SimpleQueue()
        self.is_serving = self.has_ended = False
        self._is_failing = False  # True if this process cannot continue
        for peer, link in self._links.items():
            self._progress[peer] = 0, time.monotonic()
            self._start_thread(f"receiver-{peer}", self._receive_loop, peer, link)
        self._start_thread("heartbeats", self._send_heartbeats)

    def _start_thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, name=f"duetto-group-{name}", daemon=True).start()

    # ------------------------------------------------------------ messages

    def broadcast(self, message: GroupMessage) -> None:
        """Send a message over all links of this rank."""
        self._sent_orders += isinstance(message, Order)
        for peer, link in self._links.items():
            try:
                link.send(message)
            except OSError as error:
                self._on_rank_lost(f"rank {peer} cannot be reached: {error}")

    def receive_orders(self) -> Iterator[Order]:
        """Yield rank 0's orders until the group ends. An order is completed when the next one is
        requested."""
        while isinstance(message := self._received.get(), Order):
            yield message
            self._done_orders += 1
        self._shut_down()

    def end_group(self) -> None:
        """End all processes of the group; called on rank 0. A process that was forked from it does
        nothing."""
        if not self.has_ended and not is_forked():
            self.has_ended = True
            self.broadcast(End())
            self._shut_down()

    def _shut_down(self) -> None:
        """Call `shutdown`, and close the links."""
        self.shutdown()
        for link in self._links.values():
            link.close()

    def abort_process(self, reason: str, code: int = LOST_EXIT_CODE) -> NoReturn:
        """End this process now, with an exit code: its programs would wait for ranks that are lost."""
        end_process(code, f"rank {self.rank} ends: {reason}")

    def fail_group(self, error: BaseException) -> NoReturn:
        """End all processes of the group because of an error of this one. Rank 0 ends first: it may have
        found the same error, and reports it to its caller."""
        time.sleep(CAUSE_SECONDS)  # if a lost rank caused the error, its link reports that meanwhile
        if isinstance(error, jax.errors.JaxRuntimeError):
            self.abort_process(f"a program failed: {error}")
        print_stderr(f"duetto: rank {self.rank} ends: {error}")
        self._is_failing = True
        for link in self._links.values():
            with suppress(OSError):
                link.send(HandshakeRejected(str(error)))
        if self.rank:
            time.sleep(self.timeout_seconds)
        end_process(1)

    # ------------------------------------------------------------ threads

    def _receive_loop(self, peer: int, link: Link[GroupMessage]) -> None:
        """Handle a rank's messages until the group ends, or the rank is lost."""
        try:
            while not self.has_ended:
                self._on_message(peer, link.receive())
        except EOFError:
            self._on_rank_lost(f"rank {peer} has ended")
        except TimeoutError:
            self._on_rank_lost(f"rank {peer} has said nothing for {self.timeout_seconds:g} s")
        except (OSError, ValueError) as error:
            self._on_rank_lost(f"rank {peer} cannot be heard: {error}")

    def _on_rank_lost(self, reason: str, code: int = LOST_EXIT_CODE) -> None:
        """End this process because a rank is lost, unless the group has ended."""
        if self.has_ended:
            return
        if self._is_failing:
            end_process(1)
        self.abort_process(reason, code)

    def _on_message(self, peer: int, message: GroupMessage) -> None:
        match message:
            case Beat(done=done):
                before, since = self._progress[peer]
                has_progress = done > before or done == self._sent_orders
                self._progress[peer] = done, time.monotonic() if has_progress else since
            case HandshakeRejected(why=why):
                time.sleep(0 if self.rank else CAUSE_SECONDS)
                self._on_rank_lost(f"rank {peer}: {why}", 1)
            case End():
                self.has_ended = True
                if self._is_failing or not self.is_serving:  # the main thread may wait for rank 0
                    self._shut_down()
                    end_process(int(self._is_failing))
                self._received.put(message)
            case _:
                self._received.put(message)

    def _send_heartbeats(self) -> None:
        """Send heartbeats until the group ends; end this process if a rank completes no order in time."""
        while not self.has_ended:
            time.sleep(self.timeout_seconds / HEARTBEATS_PER_TIMEOUT)
            for peer, link in self._links.items():
                with suppress(OSError):  # the thread that receives from this rank reports it
                    link.send(Beat(self._done_orders))
                done, since = self._progress[peer]
                if done < self._sent_orders and time.monotonic() - since > self.timeout_seconds:
                    self._on_rank_lost(f"rank {peer} has done no order for {self.timeout_seconds:g} s")
