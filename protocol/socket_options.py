"""Options of both kinds of sockets: how much may queue, when a dead connection is noticed, who may read along."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from protocol.codec import Limits
from protocol.curve import LearnerKeys, ServerKeys
from protocol.curve_auth import HANDSHAKE_S, ZAP_DOMAIN

LINGER_S = 1.0
"""Longest that closing a socket waits for unsent messages."""


@dataclass(frozen=True)
class Queues:
    """High-water marks per peer, in messages. A full receive queue makes the sender wait, so it may be short."""

    send: int
    receive: int


CONTROL_QUEUES = Queues(send=256, receive=32)
"""Of the learner's control socket. Acknowledgements come in bursts; bulk (tickets) is bounded by admission."""
CHUNK_QUEUES = Queues(send=64, receive=32)
"""Of the learner's weights socket: chunks a slow reader may have waiting, hence the largest useful `window`."""
SERVER_QUEUES = Queues(send=32, receive=64)
"""Of a rollout server's sockets."""


def configure(sock: zmq.Socket, limits: Limits, queues: Queues, linger_s: float) -> None:
    sock.setsockopt(zmq.SNDHWM, queues.send)
    sock.setsockopt(zmq.RCVHWM, queues.receive)
    sock.setsockopt(zmq.LINGER, round(linger_s * 1000))
    sock.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    # libzmq hangs up on a longer frame before it has read it, so senders check first (see `encode`).
    sock.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        sock.setsockopt(option, value)


def become_curve_server(sock: zmq.Socket, keys: LearnerKeys) -> None:
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    sock.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # if the gate were gone nobody would get in


def become_curve_client(sock: zmq.Socket, keys: ServerKeys) -> None:
    sock.setsockopt(zmq.CURVE_SERVERKEY, keys.learner_public)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
