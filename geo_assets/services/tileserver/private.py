"""Who may ask for what is nobody else's business: devices, triggers, and writing. Decided by names, never by secrets.

A page of another site runs in the same browser and reaches this server as well. It is told apart by what browsers say
of themselves (Origin, Sec-Fetch-Site), and one that took over a name of its own for this machine by the Host.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from geo_assets import addresses
from geo_assets.services.problems import ProblemError

if TYPE_CHECKING:
    from starlette.requests import Request


class SameOrigin:
    """Lets requests of the server's own page through.

    Args:
        public_url: The tile server's public URL.
    """

    def __init__(self, public_url: str) -> None:
        url = urlsplit(public_url)
        self._public = (url.scheme, url.netloc.lower())

    def check(self, request: Request, *, writes: bool) -> None:
        """Refuse what does not come of a page of this server.

        Args:
            request: The request.
            writes: Whether it changes something: then a browser must have said where it comes from.

        Raises:
            ProblemError: 403; the header at fault.
        """
        host = request.headers.get("host", "").lower()
        if host != self._public[1] and not _is_address(host):
            raise _refused("Host", host, "Only by its public name, or an address, is this served.", self._public[1])
        site = request.headers.get("sec-fetch-site")
        if site not in (None, "same-origin") and (writes or site != "none"):
            raise _refused("Sec-Fetch-Site", site, "A page of another site may not ask for this.", "same-origin")
        origin = request.headers.get("origin")
        if origin is None:
            if writes:
                raise _refused("Origin", None, "The Origin header is missing; browsers send it.", self._named(host))
            return
        # An origin is scheme and host, to the letter (RFC 6454, section 6.2): no path, no name of a user.
        own = origin.lower() in {"://".join(self._public), f"http://{host}", f"https://{host}"}
        if not own:
            raise _refused("Origin", origin, "A page of another site may not ask for this.", self._named(host))

    def _named(self, host: str) -> str:
        return f"{self._public[0]}://{self._public[1] if host == self._public[1] else host}"


def _is_address(host: str) -> bool:
    """Whether a Host names an address or this machine itself: no page of elsewhere can take such a name."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if addresses.is_loopback(name):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(field: str, value: str | None, detail: str, limit: str) -> ProblemError:
    return ProblemError(403, "origin", detail, field=field, value=value, limit=limit)
