"""Makes a quantised checkpoint of a float one: `quire quantize`.

`layers.py` finds what can be quantised, `codes.py` makes codes of a weight, `study.py` measures
what each choice costs, `choose.py` chooses, `writer.py` writes compressed-tensors, `report.py`
tells.
"""
