"""Is the candidate better, and if that is not known yet, which run would tell.

Pure functions from measurements to words: no I/O, no clock, no randomness. Everything is done on logarithms of output
tok/s, so that a gain and the loss that undoes it have the same size. `noise` says what the runs mean, `course` rules
on one experiment launch by launch, `boundary` and `spending` keep the night's error, `effects` reports, `guards` veto,
`assess` puts it into words. How and why: docs/explanation/how-it-decides.md.
"""

from agent.judge.assess import asks_answers, assess, close, false_keep_share, runs_per_launch
from agent.judge.comparison import Assessment, Comparison, Need, Prices, Seen, figures, log_of, log_tok_s, parent_runs
from agent.judge.effects import effect_at, objective_effect, run_noise
from agent.judge.progress import Pace, collapsing, pace

__all__ = [
    "Assessment",
    "Comparison",
    "Need",
    "Pace",
    "Prices",
    "Seen",
    "asks_answers",
    "assess",
    "close",
    "collapsing",
    "effect_at",
    "false_keep_share",
    "figures",
    "log_of",
    "log_tok_s",
    "objective_effect",
    "pace",
    "parent_runs",
    "run_noise",
    "runs_per_launch",
]
