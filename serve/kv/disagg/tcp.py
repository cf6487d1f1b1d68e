"""Pages inside the messages about them."""

from ..offload.tier import Content


class TcpTransport:
    """Writer and reader in one: nothing is kept between a page's message and its reader."""

    offer = b""

    def writer(self, size: int) -> "TcpTransport":
        return self

    def reader(self, offer: bytes, size: int) -> "TcpTransport":
        return self

    def write(self, content: Content) -> bytes:
        return content

    def settle(self, seconds: float) -> None:
        """Return at once: the page has been sent."""

    def read(self, size: int, carried: bytes, until: float) -> Content:
        return carried

    def close(self) -> None: ...
