"""The line observe → plan → choose → apply → measure → judge → settle as a LangGraph; it must not hold any truth.

The checkpoint file is a convenience for looking at a run; every start and every resume enters at `observe`, which
reads the host and the store, so the file may be deleted at any time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("LANGSMITH_TRACING", "false")  # targets are private; set before langchain is imported
os.environ.setdefault("LANGGRAPH_STRICT_MSGPACK", "true")

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

from agent.nodes import LoopState, Nodes

GRAPH_VERSION = 1
STEPS_LIMIT = 1_000_000
NODES = ("observe", "heal", "plan", "choose", "apply", "measure", "judge", "settle", "finish")


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
    """Run the session to its end, or until a node raises."""
    async with AsyncSqliteSaver.from_conn_string(str(checkpoints)) as saver:
        graph: Any = build(nodes).compile(checkpointer=saver)
        await graph.ainvoke(
            {"session_id": session_id, "next": "observe"},
            {"configurable": {"thread_id": f"{session_id}:v{GRAPH_VERSION}"}, "recursion_limit": STEPS_LIMIT},
            durability="sync",
        )
