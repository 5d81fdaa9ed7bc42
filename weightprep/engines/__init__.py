"""Serving engines that weightprep plugs into, one package each."""
