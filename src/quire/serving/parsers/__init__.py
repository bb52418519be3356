"""Parsers of tool calls and reasoning, one file per syntax, over a few shared parts.

`scan.py` finds marks in text that comes in pieces, `json_text.py` and `python_text.py` read values,
`call_object.py` reads calls written as JSON objects, `typed_values.py` gives untyped values the
types of a tool's schema. The tables of names are in `serving/parsing.py`;
`serving/model_parsers.py` picks the parsers for a model.
"""
