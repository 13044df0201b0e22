"""When each prefill instance, each decode instance and the network is due next: a tournament tree.

Slots: prefill p is p, decode d is P + d, the network P + D. On equal times the network wins, then the lower slot.
"""

from __future__ import annotations

import numpy as np

from .compile import compiled
from .memory import check, f8_at, i4_at


@compiled
def network_slot(world):
    return world.prefills + world.decodes


@compiled
def set_due(world, slot, due_s):
    """Slot `slot` is due at `due_s`; keeps the winner of the tree right."""
    due = f8_at(world.due_s)
    winners = i4_at(world.winners)
    network = network_slot(world)
    due[check(slot, network + 1)] = due_s
    node = (world.leaves + slot) >> 1
    while node >= 1:
        winners[node] = _winner(due, winners[2 * node], winners[2 * node + 1], network)
        node >>= 1


@compiled
def _winner(due, left, right, network):
    # leaves beyond the slots hold -1; the network is the last slot, but wins ties
    if right < 0:
        return left
    if due[right] < due[left] or (due[right] == due[left] and right == network):
        return right
    return left


@compiled
def next_due(world):
    """(the slot that is due first, when)."""
    slot = i4_at(world.winners)[1]
    return slot, f8_at(world.due_s)[slot]


@compiled
def clear_timers(world):
    """Nothing is due."""
    due = f8_at(world.due_s)
    winners = i4_at(world.winners)
    network = network_slot(world)
    for slot in range(world.leaves):
        winners[world.leaves + slot] = slot if slot <= network else -1
    for slot in range(network + 1):
        due[slot] = np.inf
    for node in range(world.leaves - 1, 0, -1):
        winners[node] = _winner(due, winners[2 * node], winners[2 * node + 1], network)
