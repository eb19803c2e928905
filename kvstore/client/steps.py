"""What a flow asks of its driver: one value a step, the same for the blocking and the asyncio driver.

A *flow* is a generator: it yields steps, is sent each one's answer or has its error thrown in, and returns its result.
It does no I/O and knows no transport. A driver carries the steps out. When a call is cancelled, the driver throws the
cancellation into the flow at the step where it waits, after the step can no longer touch anything of the caller's; the
flow's ``finally`` gives back what it had taken, with ``post`` and ``forget`` of the link, which wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    # Loads numpy, which admin tools start without.
    from kvstore.client.handshake import Welcome

T = TypeVar("T")

Late = Callable[[bytes], object]
"""Takes the reply of a call that nobody waits for any more, and gives back what was done for it. Must not block."""


class Copying(Protocol):
    """Copies that lie alike."""

    def run(self, threads: int) -> None:
        """Copy, on so many threads at most; returns when it is done."""


class Link(Protocol):
    """One session with the daemon, as flows see it. Once ``closed`` it never works again."""

    welcome: Welcome
    pushes: bool
    """Whether ends of jobs are pushed; else the client asks with WaitJob."""
    generation: int
    """Counts the links of one client."""
    peer_fd: int
    """The socket that hangs up when the daemon goes, where that is on this host; else -1."""

    @property
    def closed(self) -> bool:
        """Whether the daemon or the transport has gone."""

    def post(self, method: str, payload: bytes) -> None:
        """Send a request whose reply nobody needs. Raises domain errors; waits for nothing but room in the socket."""

    def pump(self) -> None:
        """Take in what is there already: ends of jobs, late replies. Does not block."""

    def close(self) -> None:
        """End the session. Idempotent."""

    def abandon(self) -> None:
        """After a fork, in the child: let go of what was inherited. The parent's session goes on untouched."""


class Connect(NamedTuple):
    """Answers the living link, made now if there is none."""


class Open(NamedTuple):
    """Answers a new link. Whoever is cancelled meanwhile leaves no session behind."""

    generation: int


class Call(NamedTuple):
    """Sends a request, answers the reply's bytes. A reply that comes later than ``timeout_s`` goes to ``late``.

    ``begun`` is called once it is sent: a call that is cancelled while it waits for its turn never is, and then no
    reply comes that could give anything back.
    """

    link: Any
    method: str
    payload: bytes
    timeout_s: float
    late: Late | None = None
    begun: Callable[[], object] | None = None


class Send(NamedTuple):
    """Sends a request, answers what ``Wait`` takes."""

    link: Any
    method: str
    payload: bytes
    timeout_s: float


class Wait(NamedTuple):
    """Answers the reply of ``Send``."""

    link: Any
    sent: Any
    method: str
    timeout_s: float
    late: Late | None = None


class Copy(NamedTuple):
    """Copies; has ended when it answers, however that is."""

    groups: Sequence[Copying]
    threads: int


class Until(NamedTuple):
    """Waits until ``ready()``, or the time is over, or the link has closed."""

    link: Any
    ready: Callable[[], bool]
    timeout_s: float


class Pause(NamedTuple):
    """Waits so long."""

    seconds: float


class Upload(NamedTuple):
    """Sends a client stream, answers its reply."""

    link: Any
    method: str
    messages: Iterator[bytes]
    timeout_s: float


class Download(NamedTuple):
    """Hands each message of a server stream to ``take``."""

    link: Any
    method: str
    payload: bytes
    timeout_s: float
    take: Callable[[bytes], None]


Step = Connect | Open | Call | Send | Wait | Copy | Until | Pause | Upload | Download
Flow = Generator[Any, Any, T]
