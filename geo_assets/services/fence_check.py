"""A process beside the tile server that says whether fences are sound: it has the geometry library, the server not.

One line of JSON in, one line out, until its input ends. It reads no port and keeps nothing, so it may be ended at any
moment: what hangs or dies in it costs the one fence.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from geo_assets.events.dead_letter import Refused
from geo_assets.events.json_text import JsonError, loads
from geo_assets.events.models import EnvelopeError, FenceEvent, parse
from geo_assets.geofence.fences import fence_of


def check(body: bytes, source: str) -> dict[str, Any]:
    """What is wrong with a fence, under `reason`, `field`, `value`, `limit` and `detail`; nothing: empty.

    Args:
        body: The event, as it was posted.
        source: Whose it is.
    """
    try:
        fence_of(parse(FenceEvent, loads(body)), source=source, revision=0)
    except Refused as fault:
        return _fault(fault.reason, fault.field, fault.value, fault.limit, fault.explanation)
    except EnvelopeError as fault:
        return _fault("envelope", fault.field, fault.value, fault.limit, fault.problem)
    except JsonError as fault:
        return _fault("envelope", "$", None, "JSON", str(fault))
    except Exception as fault:
        # Whatever a library finds wrong with a fence costs that fence and no other.
        return _fault("invalid_geometry", "geometry", None, None, f"{type(fault).__name__}: {fault}"[:300])
    return {}


def _fault(reason: str, field: str | None, value: object, limit: object, detail: str) -> dict[str, Any]:
    shown = None if value is None else str(value)
    return {"reason": reason, "field": field, "value": shown, "limit": limit and str(limit), "detail": detail}


def main() -> None:
    """Answer lines until the input ends."""
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        answer = check(base64.b64decode(asked["body"]), asked["source"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
