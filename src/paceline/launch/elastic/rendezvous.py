"""The rendezvous of torch's elastic agents, with a seal on everything that is unpickled.

Any process that reaches a store can read and change its content. So content is unpickled only if it carries
the seal of a key, which is passed outside of the store.
"""

import hmac

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

BACKEND = "paceline"
SEAL_BYTES = 32


def build_run_id(name: str, key: str) -> str:
    """Return a name in a store that cannot be guessed without the key, and that does not reveal the key."""
    return f"{name}-{hmac.digest(key.encode(), name.encode(), 'sha256').hex()[:16]}"


class SealedBackend(RendezvousBackend):
    """The state of a rendezvous in a store, sealed with a key, since agents unpickle it (torch 2.13)."""

    def __init__(self, store: dist.Store, name: str, key: str):
        self._inner, self._key = C10dRendezvousBackend(store, name), key.encode()

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        entry = self._inner.get_state()
        return (self._unseal(entry[0]), entry[1]) if entry is not None else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        entry = self._inner.set_state(self._seal(state) + state, token)
        return (self._unseal(entry[0]), *entry[1:]) if entry is not None else None

    def _seal(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _unseal(self, sealed: bytes) -> bytes:
        seal, state = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(state)):
            raise RendezvousStateError(
                "the store of this training holds a state without its key: another program wrote into it"
            )
        return state
