"""The arguments of the two attention kernels: those of a layer, and those of a pass, which all layers share."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import ClassVar, Final

from worker.decoding.network.kernels.threads import argument_fields


class At(IntEnum):
    """Where a layer's arguments lie: addresses, numbers, and float64s by their bits."""

    TAKEN = 0
    QKV = 1  #: [tokens, queries + 2 * keys, head_dim]; pairs to be rotated lie side by side
    HELD = 2  #: keys and values of all slots; in pairs where reads attend in tiles
    SEEN = 3  #: [tokens, queries, head_dim], written
    NUM_QUERIES = 4  #: heads
    SCALING = 5
    WINDOW = 6  #: positions that a token looks back on, itself included; 0: all
    ROTATIONS = 7  #: [positions, head_dim / 2, 2]: cosine, sine
    NUM_POSITIONS = 8
    NORMS = 9  #: [queries + keys, head_dim]; 0 without
    EPSILON = 10
    OF_PASS = 11  #: address of a pass's arguments


class PassAt(IntEnum):
    """Where a pass's arguments lie."""

    SHORT = 0  #: int64 [reads, 4] of reads that attend by themselves: slot, tokens held before, first token, tokens
    NUM_SHORT = 1
    PIECES = 2  #: the same of pieces of long reads, whose tokens are put into the cache
    NUM_PIECES = 3
    WIDE = 4  #: the same of long reads as a whole
    NUM_WIDE = 5
    NUM_TOKENS = 6
    POSITIONS = 7  #: int64 [tokens]
    ANCESTRY = 8  #: uint64 [tokens]: bit i says that token i of its short read is seen
    SLOT_SIZE = 9  #: numbers from a slot's keys and values to the next slot's, in a layer
    HEAD_SIZE = 10  #: from a head's to the next head's; values' heads follow the keys'
    BLOCK_SIZE = 11  #: from a block's to the next block's, in pairs; 0 where they are not in blocks


class Arguments(ctypes.Structure):
    """A layer's arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At, At.SCALING, At.EPSILON)


class PassArguments(ctypes.Structure):
    """A pass's arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(PassAt)


NUM_ARGUMENTS: Final = len(At)
NUM_PASS_ARGUMENTS: Final = len(PassAt)
