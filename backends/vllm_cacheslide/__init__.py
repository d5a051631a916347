"""CacheSlide inside vLLM: cross-position reuse as a KV connector, and the backend that uses it.

Importing this package imports nothing of vLLM: its parts do when they are named by an entry point.
"""
