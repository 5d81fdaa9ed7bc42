"""Put a model's weights into exactly the form on which the fast kernels gate, and say so, or fail, at startup.

Importing this package touches no GPU and imports neither sglang, aiter nor triton: the plugin entry point runs in
every process of a server, and `weightprep inspect` runs on machines that have none of them.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
