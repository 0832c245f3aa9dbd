"""How torch's elastic agents meet. Whoever reaches a store can read and change what is in it, so nothing is unpickled that was in one, but
what carries the seal of a key that is passed outside of it."""

import hmac

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

BACKEND = "paceline"
SEAL_BYTES = 32


def run_id(name: str, key: str) -> str:
    """A name in a store that nobody can guess without the key, and from which the key cannot be worked out."""
    return f"{name}-{hmac.digest(key.encode(), name.encode(), 'sha256').hex()[:16]}"


class SealedBackend(RendezvousBackend):
    """Where torch's agents on several nodes keep the state of their meeting, which they unpickle (torch 2.13): with a seal of the key."""

    def __init__(self, store: dist.Store, name: str, key: str):
        self._inner, self._key = C10dRendezvousBackend(store, name), key.encode()

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._inner.get_state()
        return (self._opened(found[0]), found[1]) if found is not None else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._inner.set_state(self._seal(state) + state, token)
        return (self._opened(found[0]), *found[1:]) if found is not None else None

    def _seal(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _opened(self, sealed: bytes) -> bytes:
        seal, state = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(state)):
            raise RendezvousStateError("somebody without the key of this training has written into its store")
        return state
