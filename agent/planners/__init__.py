"""Where proposals come from; a planner proposes and never executes."""
