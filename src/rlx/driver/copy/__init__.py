"""Asynchronous tile copies and double buffering: move tile k+1 while tile k is computed on."""

from __future__ import annotations

from rlx.driver.copy.buffers import DoubleBuffer, RingBuffer
from rlx.driver.copy.engine import AsyncCopy, BarrierToken, CopyEngine, CopyStats, SyncCopy
from rlx.driver.copy.pipeline import PipelineRun, pipelined
from rlx.driver.copy.thread import ThreadCopy
from rlx.driver.region import FileMemory, Tile

__all__ = [
    "BarrierToken",
    "AsyncCopy",
    "CopyEngine",
    "CopyStats",
    "SyncCopy",
    "ThreadCopy",
    "Tile",
    "FileMemory",
    "DoubleBuffer",
    "RingBuffer",
    "pipelined",
    "PipelineRun",
]
