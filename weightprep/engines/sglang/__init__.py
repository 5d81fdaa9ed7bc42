"""The sglang plugin: what `--load-format weightprep` does inside a server.

Nothing is imported here: sglang loads `plugin` in every one of its processes, and only the scheduler needs the rest.
"""
