"""The contract between the learner and its rollout servers. A leaf: it imports no other package of ours.

Reading order:

1. `messages/`: every message, as typed models. Start here.
2. `errors.py`: codes of errors in messages and peers.
3. `frames.py`, `codec.py`: how a message becomes ZeroMQ frames and back.
4. `sockets.py`, `endpoints.py`: the learner's ROUTER, a server's DEALER, their queues and addresses.
5. `curve.py`: keys, and authentication of connections. `handshake.py`: the answer to a hello, and budgets of
   messages per peer.
6. `weight_file.py`, `weights.py`, `download.py`: one policy version, published in shared
   memory, mapped by servers on the same host or pulled in chunks over ZeroMQ.
7. `device_lock.py`: the lock on a device that learner and server share. `faults.py`: crash points for tests.

`README.md` has the sequence diagram, the rules, and tables of messages and errors.
"""
