"""Models with contextual positions (CoPE) in vLLM: their config, their layers, their attention.

In: a checkpoint of model type `cope_llama`, as `cacheslide train` writes it. Out: a model like any
other of vLLM's. Importing this package imports nothing of vLLM.
"""
