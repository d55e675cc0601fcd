"""Parts of benchmarks/search.py: recorded surfaces, the planners that search them, and how they are scored."""
