"""The line observe → plan → choose → apply → measure → judge → settle as a LangGraph; it must not hold any truth.

The checkpoint file is a convenience for looking at a run; every start and every resume enters at `observe`, which
reads the host and the store, so the file may be deleted at any time.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("LANGSMITH_TRACING", "false")  # targets are private; set before langchain is imported
os.environ.setdefault("LANGGRAPH_STRICT_MSGPACK", "true")

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

from agent.nodes import LoopState, Nodes

GRAPH_VERSION = 3
STEPS_LIMIT = 1_000_000
NODES = ("observe", "heal", "plan", "consult", "refine", "choose", "apply", "measure", "judge", "settle", "finish")


def _route(state: LoopState) -> str:
    return END if state["next"] == "end" else state["next"]


def build(nodes: Nodes) -> StateGraph[LoopState]:
    """The graph; no node has a retry policy, because every node may have effects."""
    graph = StateGraph(LoopState)
    for name in NODES:
        graph.add_node(name, getattr(nodes, name))
        graph.add_conditional_edges(name, _route, [*NODES, END])
    graph.add_edge(START, "observe")
    return graph


async def run(nodes: Nodes, session_id: str, checkpoints: Path) -> None:
    """Run the session to its end, or until a node raises.

    Checkpoints of earlier runs are thrown away unread, and if they cannot be kept, now or later, the run goes on
    without: it enters at `observe` again, as after a crash. Our own database never shows up here as an sqlite3.Error.
    """
    _throw_away(checkpoints)
    try:
        async with AsyncSqliteSaver.from_conn_string(str(checkpoints)) as saver:
            await _invoke(build(nodes).compile(checkpointer=saver), session_id)
    except sqlite3.Error as unkept:
        nodes.hands.progress.phase(f"going on without checkpoints, which nothing needs: {unkept}")
        _throw_away(checkpoints)
        await _invoke(build(nodes).compile(), session_id)


async def _invoke(graph: Any, session_id: str) -> None:
    await graph.ainvoke(
        {"session_id": session_id, "next": "observe"},
        {"configurable": {"thread_id": f"{session_id}:v{GRAPH_VERSION}"}, "recursion_limit": STEPS_LIMIT},
        durability=None if graph.checkpointer is None else "sync",
    )


def _throw_away(checkpoints: Path) -> None:
    """As far as that goes: what cannot be removed cannot be written either."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with suppress(OSError):
            checkpoints.with_name(checkpoints.name + suffix).unlink(missing_ok=True)
