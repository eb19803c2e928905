"""Rows of the calls about reading plans: OpenPlan, ExtendPlan, AdvancePlan, ClosePlan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvstore.cache import PlanKeys, PlanOpened, PlanPass
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Area, BlockKey, Codec, NamespaceId, Place, PlanId
from kvstore.v1 import plans_pb2
from kvstore.wire import messages
from kvstore.wire.verbs.base import Asked, Ids, Runs, Verb

IDLE_MS: Final = 60_000
"""Time of a plan that names none."""


def plan_of(number: int) -> PlanId:
    """A plan id that is not 0."""
    if not number:
        raise InvalidArgument("plan_id", 0, "the id of a plan of this session, from OpenPlan")
    return PlanId(number)


def _keys_message(keys: PlanKeys) -> plans_pb2.PlanKeys:
    return plans_pb2.PlanKeys(
        outcomes=keys.outcomes,  # type: ignore[arg-type]
        reasons=keys.reasons,  # type: ignore[arg-type]
        residency=keys.residency,
    )


def _keys_of(message: plans_pb2.PlanKeys) -> PlanKeys:
    return PlanKeys(
        messages.members(messages.OUTCOMES, message.outcomes[:]),
        messages.members(messages.REASONS, message.reasons[:]),
        tuple(message.residency),
    )


def _open(call: Asked, request: plans_pb2.OpenPlanRequest) -> plans_pb2.OpenPlanResponse:
    namespace, keys = messages.target_of(request.namespace_id, request.keys)
    opened = call.session.open_plan(
        namespace,
        keys,
        layers=messages.layers_of(request.layer_begin, request.layer_end),
        piece_bytes=request.piece_bytes,
        pieces=request.pieces,
        idle_ms=request.idle_ms or IDLE_MS,
    )
    reply = plans_pb2.OpenPlanResponse(plan_id=opened.plan_id, keys=_keys_message(opened.keys))
    if opened.ring is not None:
        reply.ring_offset, reply.slot_bytes, reply.ring_version = (
            opened.ring.offset, opened.ring.stride, opened.ring.version,
        )  # fmt: skip
    return reply


def _pack_open(  # noqa: PLR0913, PLR0917  the arguments of Cache.open_plan
    _ids: Ids,
    namespace_id: NamespaceId,
    keys: Sequence[BlockKey],
    layers: tuple[int, int] | None,
    piece_bytes: int,
    pieces: int,
    idle_ms: int,
) -> plans_pb2.OpenPlanRequest:
    begin, end = layers or (0, 0)
    return plans_pb2.OpenPlanRequest(
        namespace_id=namespace_id,
        keys=b"".join(keys),
        layer_begin=begin,
        layer_end=end,
        piece_bytes=piece_bytes,
        pieces=pieces,
        idle_ms=idle_ms,
    )


def _opened(ids: Ids, _arguments: tuple[Any, ...], reply: plans_pb2.OpenPlanResponse, generation: int) -> PlanOpened:
    ring = Place(Area.BUFFER, reply.ring_offset, reply.slot_bytes, Codec.RAW, reply.ring_version)
    return PlanOpened(PlanId(ids.outward(reply.plan_id, generation)), ring, _keys_of(reply.keys))


def _close_of(opened: PlanOpened) -> tuple[Verb[Any], tuple[Any, ...]] | None:
    return (CLOSE_PLAN, (opened.plan_id,)) if opened.plan_id else None


OPEN_PLAN: Final = Verb(
    name="kvstore.v1.Plans/OpenPlan",
    request=plans_pb2.OpenPlanRequest,
    reply=plans_pb2.OpenPlanResponse,
    serve=_open,
    runs=Runs.WORK,
    pack=_pack_open,
    unpack=_opened,
    fallback=lambda _ids, _namespace_id, keys, *_more: PlanOpened(PlanId(0), None, PlanKeys.missed(len(keys))),
    undo=_close_of,
)


def _extend(call: Asked, request: plans_pb2.ExtendPlanRequest) -> plans_pb2.ExtendPlanResponse:
    keys = messages.keys_of(request.keys)
    return plans_pb2.ExtendPlanResponse(keys=_keys_message(call.session.extend_plan(plan_of(request.plan_id), keys)))


EXTEND_PLAN: Final = Verb(
    name="kvstore.v1.Plans/ExtendPlan",
    request=plans_pb2.ExtendPlanRequest,
    reply=plans_pb2.ExtendPlanResponse,
    serve=_extend,
    runs=Runs.WORK,
    pack=lambda ids, plan_id, keys: plans_pb2.ExtendPlanRequest(plan_id=ids.plan(plan_id), keys=b"".join(keys)),
    unpack=lambda _ids, _arguments, reply, _generation: _keys_of(reply.keys),
    fallback=lambda _ids, _plan_id, keys: PlanKeys.missed(len(keys)),
)


def _advance(call: Asked, request: plans_pb2.AdvancePlanRequest) -> plans_pb2.AdvancePlanResponse:
    made = call.session.advance_plan(
        plan_of(request.plan_id),
        layers=messages.layers_of(request.layer_begin, request.layer_end),
        blocks=list(request.blocks) if request.some else None,
        drop=request.drop,
    )
    return plans_pb2.AdvancePlanResponse(number=made.number, pieces=made.pieces)


def _pack_advance(
    ids: Ids, plan_id: PlanId, layers: tuple[int, int] | None, blocks: Sequence[int] | None, drop: bool
) -> plans_pb2.AdvancePlanRequest:
    begin, end = layers or (0, 0)
    return plans_pb2.AdvancePlanRequest(
        plan_id=ids.plan(plan_id),
        layer_begin=begin,
        layer_end=end,
        blocks=blocks or (),
        some=blocks is not None,
        drop=drop,
    )


ADVANCE_PLAN: Final = Verb(
    name="kvstore.v1.Plans/AdvancePlan",
    request=plans_pb2.AdvancePlanRequest,
    reply=plans_pb2.AdvancePlanResponse,
    serve=_advance,
    pack=_pack_advance,
    unpack=lambda _ids, _arguments, reply, _generation: PlanPass(reply.number, reply.pieces),
    fallback=lambda _ids, *_arguments: PlanPass(0, 0),
)


CLOSE_PLAN: Final[Verb[bool]] = Verb(
    name="kvstore.v1.Plans/ClosePlan",
    request=plans_pb2.ClosePlanRequest,
    reply=plans_pb2.ClosePlanResponse,
    serve=lambda call, request: plans_pb2.ClosePlanResponse(ended=call.session.close_plan(plan_of(request.plan_id))),
    runs=Runs.WORK,
    pack=lambda ids, plan_id: plans_pb2.ClosePlanRequest(plan_id=ids.plan(plan_id)),
    unpack=lambda _ids, _arguments, reply, _generation: bool(reply.ended),
    fallback=lambda _ids, _plan_id: False,
)

VERBS: Final[tuple[Verb[Any], ...]] = (OPEN_PLAN, EXTEND_PLAN, ADVANCE_PLAN, CLOSE_PLAN)
