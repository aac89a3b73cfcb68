"""What the main thread asks of the exchange thread, which sleeps in a poll of its sockets."""

from __future__ import annotations

import queue
from collections.abc import Callable

import zmq


class ThreadMailbox:
    """`give` on one thread; on the other, poll `given` and `obey`, which runs them in their order."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]):
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker, self.given = _wake_up_pair(context)

    def give(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self._waker.send(b"")

    def obey(self) -> None:
        while self.given.poll(0):
            self.given.recv()
        while not self._orders.empty():
            self._orders.get_nowait()()

    def close(self) -> None:
        for socket in (self.given, self._waker):
            socket.close()


def _wake_up_pair(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A connected pair inside the process: what one thread sends ends the other's poll."""
    woken, waker = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    address = f"inproc://wake-{id(woken):x}"
    woken.bind(address)
    waker.connect(address)
    for socket in (woken, waker):
        socket.setsockopt(zmq.LINGER, 0)
    return waker, woken
