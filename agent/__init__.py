"""Judgement: what to try, whether it was better, what to do about it, and the one loop that asks in that order."""
