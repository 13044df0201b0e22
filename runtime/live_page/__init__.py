"""The live page: what a sidecar sees and decides, as a person would want to look at it. Read-only.

`GET /live` is the page; it asks `GET /live/state?after=N` once a second, which answers with the workers as they are now
and with what was decided and what ended since decision N. `GET /live/why?id=ID` explains a decision. The page is three
files, those beside this one with what all `pages` have, and loads nothing else.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from google.protobuf.json_format import MessageToDict

from pages import script, style

from ..conductor import Conductor, Made
from ..live_state import Reservation
from ..metrics import WorkerGauges
from ..request import Assignment
from ..server import explanation_of

KEPT = 500  # decisions, and outcomes: what the charts show
_HERE = Path(__file__).parent
_FILES = {
    "": ((_HERE / "index.html").read_text(encoding="utf-8"), "text/html"),
    "page.js": (script(_HERE), "text/javascript"),
    "page.css": (style(_HERE), "text/css"),
}
_HEADERS = {  # the page is its own; nothing may be loaded from elsewhere, nor frame it
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class LivePage:
    """What the page shows, gathered from a conductor's decisions and their ends.

    Args:
        conductor: who decides. workers: their gauges now. note: of a worker, what is wrong with it ("" for nothing).
    """

    def __init__(
        self,
        conductor: Conductor,
        workers: Callable[[], list[WorkerGauges]],
        note: Callable[[str], str] = lambda worker_id: "",
    ) -> None:
        self.conductor = conductor
        self.workers = workers
        self.note = note
        self.decisions: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.outcomes: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.made = 0  # numbers both
        self.rejected: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.assigned = self.good = self.asked_shadow = self.agreed_shadow = 0
        conductor.on_made.append(self._made)
        conductor.on_ended.append(self._ended)

    def _made(self, made: Made) -> None:
        if made.request.dry_run:
            return
        answer = made.answer
        self.made += 1
        row: dict[str, Any] = {
            "number": self.made,
            "at_s": made.arrival_s,
            "id": answer.request_id,
            "tokens": len(made.request.tokens) if made.request.tokens is not None else made.request.input_tokens,
            "tenant": made.request.tenant,
            "policy": answer.policy,
            "fell_back": answer.fell_back,
            "decision_us": round(made.seconds * 1e6, 1),
            "ttft_s": _known(answer.predicted_ttft_s),
            "tbt_s": _known(answer.predicted_tbt_s),
        }
        if isinstance(answer, Assignment):
            self.assigned += 1
            row |= {"prefill": answer.prefill.id, "decode": answer.decode.id, "reused_tokens": answer.reused_tokens}
            row["source"] = answer.source.name.lower()
        else:
            self.rejected[answer.reason.value] += 1
            row |= {"reason": answer.reason.value, "retry_after_s": round(answer.retry_after_s, 1)}
        if self.conductor.shadow is not None and made.observation is not None and made.shadow_action is not None:
            self.asked_shadow += 1
            row["shadow_agrees"] = made.shadow_action == made.action
            self.agreed_shadow += row["shadow_agrees"]
        self.decisions.append(row)

    def _ended(self, reservation: Reservation) -> None:
        self.ended[reservation.end] += 1
        if reservation.end != "finished" or not reservation.reported:
            return
        self.made += 1
        ttft_s, tbt_s = _known(reservation.ttft_s), _known(reservation.tbt_s)
        # as the metrics count it: good unless it is known to miss an SLO
        good = not (reservation.ttft_s > reservation.ttft_slo_s or reservation.tbt_s > reservation.tbt_slo_s)
        self.good += good
        self.outcomes.append(
            {
                "number": self.made,
                "at_s": float(self.conductor.state.clock["now_s"]),
                "ttft_s": ttft_s,
                "tbt_s": tbt_s,
                "predicted_ttft_s": _known(reservation.predicted_ttft_s),
                "predicted_tbt_s": _known(reservation.predicted_tbt_s),
                "good": good,
            }
        )

    def state(self, after: int) -> dict[str, Any]:
        """All that changes: the workers now; decisions and outcomes numbered above `after`."""
        conductor, state = self.conductor, self.conductor.state
        conductor.catch_up()
        state.count_blocks()
        caches = state.observer.parameters.prefill
        nodes = state.observer.parameters.decode
        workers = []
        for gauges in self.workers():
            row = {"id": gauges.worker, "role": gauges.role, "up": gauges.up, "note": self.note(gauges.worker)}
            row |= {"pending": gauges.pending_requests, "metrics_age_s": _known(gauges.metrics_age_s)}
            p, d = state.prefill_of.get(gauges.worker), state.decode_of.get(gauges.worker)
            if p is not None:
                row["queue_s"] = _known(gauges.queue_s)
                for tier in ("host", "device"):
                    row[f"{tier}_blocks"] = int(state.prefill[f"{tier}_used"][p])
                    row[f"{tier}_capacity"] = int(caches[f"{tier}_blocks"][p])
            if d is not None:
                batch, kv_tokens, node = gauges.batch or 0.0, gauges.kv_tokens or 0.0, nodes[d]
                row |= {"batch": batch, "kv_tokens": kv_tokens, "kv_capacity": int(node["kv_capacity_tokens"])}
                step_s = node["step_base_s"] + node["step_request_s"] * batch + node["step_token_s"] * kv_tokens
                row["tbt_s"] = float(step_s) if batch else 0.0
            workers.append(row)
        return {
            "number": self.made,
            "now_s": float(state.clock["now_s"]),
            "cluster": state.spec.name,
            "policy": conductor.policy.name,
            "fallback": conductor.fallback.name,
            "shadow": conductor.shadow.name if conductor.shadow else "",
            "canary": conductor.canary.name if conductor.canary else "",
            "canary_share": conductor.canary_share,
            "draining": conductor.draining,
            "panic": state.panic,
            "slo": {"ttft_s": state.spec.slo.ttft_s, "tbt_s": state.spec.slo.tbt_s},
            "in_flight": len(state.flying),
            "assigned": self.assigned,
            "good": self.good,
            "rejected": dict(self.rejected),
            "ended": dict(self.ended),
            "shadow_asked": self.asked_shadow,
            "shadow_agreed": self.agreed_shadow,
            "index": {"blocks": state.index.used, "capacity": state.index.capacity, "evicted": state.index.evicted},
            "workers": workers,
            "decisions": [row for row in self.decisions if row["number"] > after],
            "outcomes": [row for row in self.outcomes if row["number"] > after],
        }

    def add_routes(self, app: web.Application) -> None:
        """GET /live, and what the page asks for."""
        for name, (text, kind) in _FILES.items():
            app.router.add_get(f"/live/{name}" if name else "/live", _file(text, kind))
        app.router.add_get("/live/state", self._get_state)
        app.router.add_get("/live/why", self._get_why)

    async def _get_state(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) < 16):
            raise web.HTTPBadRequest(text=f"after: expected the number of a decision, found {after[:40]!r}\n")
        return _json(self.state(int(after)))

    async def _get_why(self, request: web.Request) -> web.Response:
        request_id = request.query.get("id", "")
        explained = self.conductor.explained(request_id)
        if explained is None:
            raise web.HTTPNotFound(text="not among the decisions remembered\n")
        message = explanation_of(explained)
        return _json(
            MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        )


def _known(number: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return None if number is None or not math.isfinite(number) else float(number)


def _json(fields: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(fields), content_type="application/json", headers=_HEADERS)


def _file(text: str, kind: str) -> Callable[[web.Request], Any]:
    async def get(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type=kind, charset="utf-8", headers=_HEADERS)

    return get
