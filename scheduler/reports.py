"""Parts of the report that `laned status` and `laned top` show: plain data, in numbers."""

from __future__ import annotations

from typing import Any

from scheduler.request import Request
from store.stats import StoreStats


def under_way(request: Request, now_s: float) -> dict[str, Any]:
    """A request that the engine has; nothing of what its client sent."""
    return {
        "row": request.row_id,
        "state": request.state.value,
        "prompt_tokens": len(request.wish.prompt),
        "processed_tokens": request.num_processed,
        "generated_tokens": request.num_generated,
        "max_tokens": request.wish.max_tokens,
        "age_s": now_s - request.times.arrived_s,
    }


def store(stats: StoreStats) -> dict[str, Any]:
    """What is remembered, by tier, and what went wrong; disk is there only where there is one."""
    tiers = {"memory": {"bytes": stats.memory_bytes, "segments": stats.memory_segments}}
    disk = stats.disk
    if disk is not None:
        tiers["disk"] = {"bytes": disk.bytes, "segments": disk.segments}
    return {
        "tiers": tiers,
        "queue_bytes": stats.queue_bytes,
        "written_bytes": stats.written_bytes,
        "dropped": stats.dropped,
        "evicted": stats.evicted + (disk.evicted if disk else 0),
        "corrupt": stats.corrupt + (disk.corrupt if disk else 0),
        "errors": stats.errors + (disk.errors if disk else 0),
        "away": bool(disk and disk.away),
    }
