"""The two kinds of sockets: the learner's ROUTER and a rollout server's DEALER.

Both decode what they receive; what cannot be decoded comes back as a `BadMessage` and is counted:
nothing dies.
"""

from protocol.reception import BadMessage
from protocol.sockets.learner import Delivery, LearnerSocket, Received
from protocol.sockets.server import SendTimeout, ServerSocket

__all__ = ["BadMessage", "Delivery", "LearnerSocket", "Received", "SendTimeout", "ServerSocket"]
