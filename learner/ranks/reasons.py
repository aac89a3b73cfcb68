"""Why a rank ends, in the ranks' store: the others may be on other machines, where nobody sees its log."""

from __future__ import annotations

import json
from contextlib import suppress

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from asyncrl.errors import BadStateError, UserError


class Reasons:
    """Reasons that the user or a state has caused. A rank that was killed has none here."""

    def __init__(self, store: Store):
        self._store = PrefixStore("reasons", store)

    def say(self, rank: int, error: UserError | BadStateError) -> None:
        with suppress(DistError, RuntimeError):  # rank 0 has gone with the store
            self._store.set(str(rank), json.dumps([isinstance(error, UserError), str(error)]))

    def of(self, rank: int) -> UserError | BadStateError | None:
        """What a rank has said before it ended."""
        with suppress(DistError, RuntimeError):
            if self._store.check([str(rank)]):
                can_be_mended, reason = json.loads(self._store.get(str(rank)))
                return (UserError if can_be_mended else BadStateError)(f"rank {rank}: {reason}")
        return None
