"""One forward and one backward for every linear layer.

A layer is a chain of stages, and a stage is

    produce -> quantize -> [gather] -> GEMM -> [reduce]

where produce is identity, a norm or an activation, made on the fly by the quantize that consumes it. Linear is one
stage, LayerNormLinear a stage with a norm, LayerNormMLP a norm stage and an activation stage.

    config.py   what a layer is (LayerSpec), and what a recipe makes of it (LayerConfig)
    weights.py  quantized weights and their workspaces
    forward.py, backward.py   the computation, on plain matrices, without autograd
    function.py the autograd boundary, eager and compiled
"""
