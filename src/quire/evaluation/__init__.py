"""How good a model is on given text, and how far from another: `quire eval`.

`windows.py` cuts the text, `scored_model.py` computes logits with the engine's own forward pass,
`compare.py` makes numbers of them. Knows no request.
"""
