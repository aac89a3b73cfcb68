"""The contract between the learner and its rollout servers. A leaf: it imports no other package of ours.

Reading order:

1. `messages/`: every message, as typed models. Start here.
2. `errors.py`: what can be wrong with a message or a peer.
3. `frames.py`, `codec.py`: how a message becomes ZeroMQ frames and back.
4. `sockets/`, `socket_options.py`, `reception.py`, `endpoints.py`: the learner's ROUTER, a server's DEALER,
   how much they queue, and where they may bind.
5. `curve.py`, `gate.py`: keys, and who gets through the handshake. `handshake.py`: who is welcome then.
6. `peers.py`: what one peer may cost the learner.
7. `layout.py`, `weights.py`, `shm.py`, `transfer.py`: one policy version, published in shared
   memory, mapped by servers on the same host or pulled in chunks over ZeroMQ.

`README.md` has the sequence diagram, the rules, and tables of messages and errors.
"""

from protocol.codec import Limits, decode, encode
from protocol.errors import ErrorCode, ProtocolError

__all__ = ["ErrorCode", "Limits", "ProtocolError", "decode", "encode"]
