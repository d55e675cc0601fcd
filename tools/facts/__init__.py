"""Facts about a host: each is a question in POSIX sh and a pure reading of the answer; asking changes nothing there."""

from tools.facts.base import Fact, ask, decode
from tools.facts.clock import ClockFact
from tools.facts.cpu import BusyFact, BusyFacts
from tools.facts.folder import Folder, FolderFact
from tools.facts.machine import (
    ComputeFact,
    Disk,
    DiskFact,
    Gpu,
    GpuFact,
    GpuFacts,
    Machine,
    MachineFact,
    Memory,
    MemoryFact,
)
from tools.facts.model import ModelFact, model_named
from tools.facts.network import ConnectionsFact, Listener, ListenersFact, PortFacts, VisitorsFact
from tools.facts.process import DescendantsFact, OpenFilesFact, ProcessFact, ProcessFacts

__all__ = [
    "BusyFact",
    "BusyFacts",
    "ClockFact",
    "ComputeFact",
    "ConnectionsFact",
    "DescendantsFact",
    "Disk",
    "DiskFact",
    "Fact",
    "Folder",
    "FolderFact",
    "Gpu",
    "GpuFact",
    "GpuFacts",
    "Listener",
    "ListenersFact",
    "Machine",
    "MachineFact",
    "Memory",
    "MemoryFact",
    "ModelFact",
    "OpenFilesFact",
    "PortFacts",
    "ProcessFact",
    "ProcessFacts",
    "VisitorsFact",
    "ask",
    "decode",
    "model_named",
]
